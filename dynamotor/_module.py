"""A compiled module is the module: the same class, parameters, buffers, hooks and keys; only its call is
compiled.

>>> compiled = compile_module(model, dispatcher, again, dynamotor.compile)
>>> isinstance(compiled, type(model)) and compiled.state_dict().keys() == model.state_dict().keys()
True
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .base import compat, probe
from .capture.marks import is_compiling


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _entry(module: torch.nn.Module, dispatcher: Callable[..., Any]) -> dict[str, Any]:
    """The method through which the compiled code is reached."""
    if not isinstance(module, DistributedDataParallel):
        warm_up = dispatcher.miss.__self__.warm_up_own  # type: ignore[attr-defined]
        own = {} if hasattr(module, "warm_up") else {"warm_up": staticmethod(warm_up)}
        return {"__call__": staticmethod(dispatcher), **own}

    def run(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():
            return dispatcher(*inputs, **kwargs)

    return {"_run_ddp_forward": run}


class _Forward:
    """`compiled.forward(...)`, called without the module's hooks: compiled too, on its own, when it is first
    asked for. An entry of that name in the module's `__dict__` has precedence.
    """

    def __init__(self, module: torch.nn.Module, again: Callable[[Any], Any]) -> None:
        self.module, self.again = module, again
        self.made: tuple[Any, Any] = (None, None)

    def __get__(self, twin: Any, cls: type) -> Any:
        if twin is None:
            return type(self.module).forward
        forward = self.module.forward
        if is_compiling():
            return forward
        if forward != self.made[0]:
            self.made = forward, self.again(forward)
        return self.made[1]


class _Signature:
    """`inspect.signature(compiled)` is the module's: C's own callable, which is called, has none."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __get__(self, twin: Any, cls: type) -> inspect.Signature:
        if twin is None:  # the class has that of its `__init__`
            raise AttributeError("__signature__")
        return inspect.signature(self.module)


def compile_module(
    module: torch.nn.Module,
    dispatcher: Callable[..., Any],
    again: Callable[[Any], Any],
    anew: Callable[..., Any],
) -> torch.nn.Module:
    """A twin of `module` that shares its `__dict__` and calls `dispatcher`.

    Sharing the very dictionary means that attributes, parameters, buffers, hooks and `training` set on either
    are seen by both; state outside of it (`__slots__`, the class) is the module's. Of a
    DistributedDataParallel module only the module inside is compiled: synchronisation stays DDP's own Python.
    `anew(module, **arguments)` is `dynamotor.compile`; `again(module)` compiles a copy: `copy.deepcopy` of
    the twin gives a compiled copy; pickling gives the plain module.
    """
    members = {
        **_entry(module, dispatcher),
        **({} if isinstance(module, DistributedDataParallel) else {"forward": _Forward(module, again)}),
        **(_writes_code(module) if isinstance(module, torch.fx.GraphModule) else {}),
        "__deepcopy__": lambda self, memo: again(copy.deepcopy(module, memo)),
        "__copy__": lambda self: again(copy.copy(module)),
        "__reduce_ex__": lambda self, protocol: (_itself, (module,)),
        "__getattr__": lambda self, name: getattr(
            module, name
        ),  # parameters and the like, and later attributes of the module's class
        "__signature__": _Signature(module),
        **(_in_place(anew) if type(module).compile is torch.nn.Module.compile else {}),
        "__prepare_scriptable__": lambda self: module,  # torch.jit.script compiles the module itself
        "_orig_mod": property(lambda self: module),
        "_dynamotor": dispatcher,
    }

    def set_class(twin: Any, cls: type) -> None:  # parametrizations give a module another class
        held[0].__class__ = cls
        object.__dict__["__class__"].__set__(twin, _twin_class(cls, held[0], members))
        _strip_at_end(twin)

    held = [module]
    members["_held"] = (held, members)
    members["__class__"] = property(lambda self: type(held[0]), set_class)
    twin: Any = object.__new__(
        _twin_class(type(module), module, members)
    )  # a `__new__` is for new modules, and this is not one
    object.__setattr__(twin, "__dict__", module.__dict__)
    _strip_at_end(twin)
    _share_state(module, twin)
    return twin


def _in_place(anew: Callable[..., Any]) -> dict[str, Any]:
    return {"compile": functools.partialmethod(_compile_in_place, anew)}


def _compile_in_place(twin: Any, anew: Callable[..., Any], **arguments: Any) -> None:
    """`compiled.compile(...)`: in place, as on modules, with the arguments of `dynamotor.compile` and none
    of the former ones. The module that was compiled stays as it is."""
    cls = object.__dict__["__class__"].__get__(twin)
    (module,), members = vars(cls)["_held"]
    fresh = anew(module, **arguments)
    if fresh is module:  # disable=True
        vars(cls)["_dynamotor"].disabled = True
        return
    made = vars(object.__dict__["__class__"].__get__(fresh))
    changed = {name: made[name] for name in _OF_DISPATCHER if name in made}
    members.update(changed)  # for the class that a parametrization gives
    for name, member in changed.items():
        type.__setattr__(cls, name, member)


_OF_DISPATCHER = (
    "__call__",
    "_run_ddp_forward",
    "warm_up",
    "forward",
    "__deepcopy__",
    "__copy__",
    "_dynamotor",
)


def _share_state(module: torch.nn.Module, twin: Any) -> None:
    """Show `fully_shard` and its kin, which keep their states beside modules, the module's state."""
    if "torch.distributed._composable_state" in sys.modules:
        states: Any = compat.states_of_modules()
        if isinstance(states, probe.MissingName):
            return
        state = states._get_module_state(module)
        if state is not None:
            states._insert_module_state(twin, state)


def _strip_at_end(twin: Any) -> None:
    """When the instance goes, release the class's references to the module: a class waits for the
    collector.
    """
    cls = object.__dict__["__class__"].__get__(twin)
    weakref.finalize(twin, _strip, weakref.ref(cls)).atexit = False


def _strip(ref: weakref.ref[Any]) -> None:
    cls = ref()
    if cls is None:
        return
    held, members = vars(cls)["_held"]
    for name in [*vars(cls)]:
        if name not in _KEPT:
            type.__delattr__(cls, name)
    members.clear()  # the property `__class__`, which no class lets go, knows both
    held.clear()


_KEPT = ("__class__", "__doc__", "__module__", "__qualname__", "__slots__", "__dict__", "__weakref__")


def _writes_code(module: Any) -> dict[str, Any]:
    """The methods by which a graph module writes its `forward`: into its own class, not into the twin's."""
    names = [name for name in ("recompile", "_real_recompile") if hasattr(module, name)]
    return {name: lambda self, name=name: getattr(module, name)() for name in names}


def _twin_class(cls: type, module: torch.nn.Module, members: dict[str, Any]) -> type:
    named = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), {"__slots__": (), **named, **_forwarded(cls, module), **members})


def _forwarded(cls: type, module: torch.nn.Module) -> dict[str, property]:
    """The slots of a class, which are stored in the module and not in its `__dict__`."""
    names = [
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    ]

    def forward(name: str) -> property:
        return property(
            lambda self: getattr(module, name),
            lambda self, value: setattr(module, name, value),
            lambda self: delattr(module, name),
        )

    return {name: forward(name) for name in names}
