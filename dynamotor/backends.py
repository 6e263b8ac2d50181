"""Backends: functions `(graph_module, example_inputs) -> callable`, one decorated function each.

>>> @register_backend
... def printing(gm, example_inputs):
...     print(gm.code)
...     return gm.forward
>>> dynamotor.compile(model, backend="printing")
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

import torch

from .autograd.aot import aot_compile
from .autograd.program_cache import Keeper
from .base import compat, extensions
from .base.config import CompileOptions, config
from .base.errors import UsageError
from .base.registry import Registry
from .codegen import compile_aten, replayed, stored
from .codegen.captured import rewrite_captured
from .foreign import call_backend
from .graph.spec import Backend, Compiled, GraphInfo
from .runtime import triton_build
from .torch_compile_adapter import torch_backend, torch_backends

backends: Registry[str, Backend] = Registry("backend")


@overload
def register_backend(fn: Backend, name: str | None = None) -> Backend: ...
@overload
def register_backend(fn: None = None, name: str | None = None) -> Callable[[Backend], Backend]: ...


def register_backend(fn: Backend | None = None, name: str | None = None) -> Any:
    """Make a backend known by name (default: the function's); usable as a decorator with or without
    arguments.

    The backend gets the captured graph and real example tensors and returns a callable that takes the same
    tensors and returns the graph's outputs as a tuple or list. Raises KeyError when the name is taken.
    """
    if fn is None:
        return lambda f: register_backend(f, name)
    UsageError.when(
        not callable(fn),
        "DM107",
        f"a backend is a callable, not {fn!r}",
        cure="register_backend(function, name='...')",
    )
    backends.add(name or fn.__name__, fn)
    return fn


def list_backends() -> list[str]:
    """Names that `compile(backend=...)` accepts: ours first, then those of `torch.compile`."""
    own = _own_names()
    return own + [n for n in torch_backends() if n not in own]


def _own_names() -> list[str]:
    return sorted({*backends, *_LATE, *extensions.names(extensions.BACKENDS)})


# Backends of the core that most programs do not need: imported when they are asked for.
_LATE = {"auto": "dynamotor.autobackend:auto"}


def _elsewhere(name: str) -> Backend | None:
    """A backend that is imported when it is asked for: the core's own, or an extension's."""
    if name not in _LATE:
        return extensions.provided(extensions.BACKENDS, name)
    module, _, function = _LATE[name].partition(":")
    return getattr(importlib.import_module(module), function)


def resolve(backend: str | Backend) -> Backend:
    """The function behind a name, or the callable itself. UsageError (DM106, DM107) for anything else."""
    if not isinstance(backend, str) and not callable(backend):
        raise UsageError(
            "DM107",
            f"a backend is a name or a callable, not {backend!r}",
            cure="pass a name, or a callable (graph_module, example_inputs) -> callable",
        )
    found = _named(backend)
    return found if _is_ours(found) else functools.partial(call_backend, found)


def _named(backend: Any) -> Any:
    if not isinstance(backend, str):
        return backend
    found = backends.get(backend) or _elsewhere(backend)
    if found is None and "xla" in backend and backend not in torch_backends():
        raise extensions.MissingExtension(f"backend {backend!r}")
    return found or torch_backend(backend, _own_names())


def _is_ours(backend: Any) -> bool:
    return (getattr(backend, "__module__", None) or "").startswith("dynamotor.")


def takes_symbols(backend: str | Backend, settings: CompileOptions, device: str, of_data: bool) -> bool:
    """Whether graphs of a device's tensors have symbols in the place of sizes that differ between calls, or
    (`of_data`) that data decides: those only our own backends know."""
    wanted = settings.dynamic is True or settings.options.get("symbolic_sizes", config.symbolic_sizes)
    if settings.options.get("pad", config.pad) and getattr(_named(backend), "pads", False):
        return wanted and not of_data
    known = backend in ("native", "auto", "eager", "aot_eager") or hasattr(backend, "takes_symbols")
    return wanted and (known or not of_data and not _is_ours(_named(backend)))


def takes_states(backend: str | Backend) -> bool:
    """Whether graphs may have calls that set states of the thread (`graph/states.py`): they are cut there."""
    return backend in ("native", "eager", "aot_eager")


def static_inputs(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Placeholders that hold the same parameter or buffer at every call."""
    return gm.meta.get("static_inputs", frozenset())


@register_backend
def eager(gm: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
    """The captured torch calls, as they are: shows what capture alone costs and does."""
    return gm.forward


@register_backend
def aot_eager(gm: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
    """Captured and differentiated ahead of time, the aten graphs run op by op."""

    def run_graph(graph: torch.fx.GraphModule, info: GraphInfo) -> Compiled:
        def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
            # Results are new to the caller: PyTorch must not take them for views, or it refuses to
            # write in place.
            with compat.BelowViews():
                return graph.forward(*inputs)

        return run

    return aot_compile(gm, list(example_inputs), run_graph, static_inputs=static_inputs(gm))


def compile_native(graph: torch.fx.GraphModule, info: GraphInfo) -> Compiled:
    """Compile one aten graph by the loop compiler, under the configuration of now."""
    # where the program set a default device, tensors that the compiler makes are still its own
    elsewhere = torch.get_default_device().type != "cpu"
    with torch.device("cpu") if elsewhere else contextlib.nullcontext():
        return compile_aten(graph, info, cuda_graphs=config.cuda_graphs)


@register_backend
def native(gm: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
    """The loop compiler: C++ or Triton kernels; oneDNN, MKL, cuDNN and cuBLAS for convolutions and matrix
    products.
    """
    rewrite_captured(gm, example_inputs)

    # a backward is compiled when it is first run, outside of what held for its forward
    compile_graph = config.bound(compile_native)
    keeper = Keeper(stored.environment, stored.describe, stored.restore)
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
        keeper = replace(keeper, prepare=triton_build.prepare)
    return aot_compile(
        gm, list(example_inputs), compile_graph, static_inputs=static_inputs(gm), keeper=keeper
    )


@register_backend
def cudagraphs(gm: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
    """As aot_eager, each graph replayed as one CUDA graph once it is warm."""

    def run_graph(graph: torch.fx.GraphModule, info: GraphInfo) -> Compiled:
        return replayed(graph.forward, graph, info)

    return aot_compile(gm, list(example_inputs), run_graph, static_inputs=static_inputs(gm))
