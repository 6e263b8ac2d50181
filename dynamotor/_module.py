"""A compiled module is the module: the same class, parameters, buffers, hooks and keys; only its call is compiled.

>>> compiled = compile_module(model, dispatcher, again)
>>> isinstance(compiled, type(model)) and compiled.state_dict().keys() == model.state_dict().keys()
True
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _entry(module: torch.nn.Module, dispatcher: Callable[..., Any]) -> dict[str, Any]:
    """The method through which the compiled code is reached."""
    if not isinstance(module, DistributedDataParallel):
        return {"__call__": staticmethod(dispatcher)}

    def run(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return dispatcher(*inputs, **kwargs)

    return {"_run_ddp_forward": run}


def compile_module(
    module: torch.nn.Module, dispatcher: Callable[..., Any], again: Callable[[torch.nn.Module], torch.nn.Module]
) -> torch.nn.Module:
    """A twin of `module` that shares its `__dict__` and calls `dispatcher`.

    Sharing the very dictionary means that attributes, parameters, buffers, hooks and `training` set on either are seen by both.
    Of a DistributedDataParallel module only the module inside is compiled: synchronisation stays DDP's own Python.
    `again(module)` compiles a copy: `copy.deepcopy` of the twin gives a compiled copy; pickling gives the plain module.
    """
    cls = type(module)
    members = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        **_entry(module, dispatcher),
        "__deepcopy__": lambda self, memo: again(copy.deepcopy(module, memo)),
        "__copy__": lambda self: again(copy.copy(module)),
        "__reduce_ex__": lambda self, protocol: (_itself, (module,)),
        "_orig_mod": property(lambda self: module),
        "_dynamotor": dispatcher,
    }
    twin_class = type(cls)(f"Compiled{cls.__name__}", (cls,), members)
    twin = object.__new__(twin_class)  # a `__new__` of the class is for new modules, and this is not one
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin
