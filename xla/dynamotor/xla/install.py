"""Makes `import torch_xla...` mean `dynamotor.xla...`, so that programs written for torch_xla run unchanged,
and modules that can be called: `torch_xla.sync()` is a function whose name a module has too.

>>> import dynamotor.xla
>>> dynamotor.xla.install_as_torch_xla()
>>> import torch_xla.core.xla_model as xm  # dynamotor.xla.core.xla_model
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ALIAS = "torch_xla"
PACKAGE = __name__.rpartition(".")[0]
_BACKEND = "torch._dynamo.backends.torchxla"  # PyTorch's module that would call torch_xla

# A folder with one package, `torch_xla`, that installs the alias when it is imported. Processes started with
# multiprocessing's `spawn` get the parent's sys.path but not its import hooks: they find `torch_xla` here.
_FOLDER = str(Path(__file__).with_name("alias"))


class _AliasFinder(MetaPathFinder, Loader):
    """Answers imports of `torch_xla[.x]` with the module `dynamotor.xla[.x]` itself, never with a second copy
    of it.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (ALIAS, _BACKEND) and not fullname.startswith(ALIAS + "."):
            return None
        real = importlib.util.find_spec(_real_name(fullname))
        if real is None:
            return None
        return ModuleSpec(
            fullname, self, origin=real.origin, is_package=real.submodule_search_locations is not None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_real_name(spec.name))
        spec.loader_state = module.__spec__  # the import system is about to replace it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


_finder = _AliasFinder()


# Modules of torch_xla whose names here are in another one.
_ELSEWHERE = {
    "_dynamo.dynamo_bridge": "bridge",
    "core.dynamo_bridge": "bridge",
    "_internal.pjrt": "distributed.xla_multiprocessing",
    "distributed.fsdp.state_dict_utils": "distributed.fsdp",
    "distributed.fsdp.utils": "distributed.fsdp",
    "distributed.fsdp.xla_fully_sharded_data_parallel": "distributed.fsdp",
    "distributed.spmd.xla_sharded_tensor": "distributed.spmd.xla_sharding",
    "experimental.distributed_checkpoint.manager": "experimental.distributed_checkpoint",
    "experimental.distributed_checkpoint.planners": "experimental.distributed_checkpoint",
    "experimental.distributed_checkpoint.util": "experimental.distributed_checkpoint",
    "experimental.eager": "regions",
    "experimental.gru": "recurrent",
    "experimental.pjrt": "runtime",
    "experimental.pjrt_backend": "distributed.xla_backend",
    "experimental.xla_sharding": "distributed.spmd.xla_sharding",
    "experimental.xla_sharded_tensor": "distributed.spmd.xla_sharding",
    "torch_xla": "toplevel",
}


def _real_name(alias: str) -> str:
    if alias == _BACKEND:
        return f"{PACKAGE}.torch_compile_openxla"
    name = alias.removeprefix(ALIAS)
    return f"{PACKAGE}.{_ELSEWHERE[name[1:]]}" if name[1:] in _ELSEWHERE else PACKAGE + name


def install_as_torch_xla() -> ModuleType:
    """Let `torch_xla` and every submodule of it stand for `dynamotor.xla`, in this process and in those it
    spawns.

    Takes precedence over an installed torch_xla. Can be called more than once. Returns the package.
    """
    package = importlib.import_module(PACKAGE)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if _FOLDER not in sys.path:
        sys.path.insert(min(1, len(sys.path)), _FOLDER)  # behind the program's own folder
    for name in [m for m in sys.modules if m == ALIAS or m.startswith(ALIAS + ".")]:
        del sys.modules[name]
    sys.modules[ALIAS] = package
    if _BACKEND in sys.modules:
        importlib.import_module(_real_name(_BACKEND))
    return package


def uninstall() -> None:
    """Take the alias away again; modules that were imported through it stay."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if _FOLDER in sys.path:
        sys.path.remove(_FOLDER)
    for name in [m for m in sys.modules if m == ALIAS or m.startswith(ALIAS + ".")]:
        del sys.modules[name]


# -- modules that can be called ------------------------------------------------------------------------------


class _CallableModule(ModuleType):
    """A module that passes a call of itself on to one of its functions."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called_as(*args, **kwargs)


def make_callable(module: ModuleType, function: Callable[..., Any]) -> None:
    """Let `module(...)` mean `function(...)`; everything else about the module stays."""
    module.__class__ = _CallableModule
    vars(module).update(_called_as=function, __signature__=inspect.signature(function))
