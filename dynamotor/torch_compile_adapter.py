"""The bridge to `torch.compile`: our backend under its capture, and its backends under ours.

This is the one module of the package that may import what the project stands beside.
>>> torch.compile(model, backend="dynamotor")       # found through the package's entry point
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from .autograd.aot import aot_compile
from .base.config import Config
from .base.errors import UsageError
from .base.events import counters
from .base.log import warn_once
from .codegen import compile_aten


def backend_for_torch_compile(
    backend: Callable[..., Callable[..., Any]],
) -> Callable[..., Callable[..., Any]]:
    """A backend `(gm, example_inputs) -> callable` of ours in the form that `torch.compile` calls.

    Graphs with symbolic sizes run their captured operations in eager PyTorch (counted as a fallback).
    """

    def compile_graph(
        gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any
    ) -> Callable[..., Any]:
        if not all(isinstance(x, torch.Tensor) for x in example_inputs):
            counters["fallback"]["torch.compile: symbolic sizes"] += 1
            return gm.forward
        return backend(gm, list(example_inputs))

    return compile_graph


dynamotor_backend = backend_for_torch_compile(functools.partial(aot_compile, compile_graph=compile_aten))


def capture_as_plain_tensor(subclass: type[torch.Tensor]) -> None:
    """Let `torch.compile` capture tensors of a subclass as it does plain ones, without looking inside."""
    from torch._dynamo.variables import builder

    wrap = builder.VariableBuilder._wrap

    def wrap_plain(self: Any, value: Any) -> Any:
        return self.wrap_tensor(value) if type(value) is subclass else wrap(self, value)

    builder.VariableBuilder._wrap = wrap_plain  # type: ignore[method-assign]  # PyTorch has no hook for it


# Options of inductor that set a field of ours, and how a value is read.
_SAME_OPTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "triton.cudagraphs": ("cuda_graphs", bool),
    "max_autotune_gemm": ("max_autotune", bool),
    "layout_optimization": ("layout_opt", bool),
    "emulate_precision_casts": ("exact", bool),
    "force_disable_caches": ("disk_cache", lambda value: not value),
    "cpp.threads": ("threads", lambda value: max(int(value), 0)),
}


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as fields of `config`: inductor's names are translated, or left out with a hint. Unknown names
    stay.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        key = name.replace("-", "_")
        if key in _OURS:
            found[key] = value
        elif key in _SAME_OPTIONS:
            field, read = _SAME_OPTIONS[key]
            found[field] = read(value)
        elif _is_of_inductor(key):
            warn_once(
                f"option {key}",
                f"option {name!r} is one of torch.compile's inductor and changes nothing here",
            )
        else:
            found[name] = value
    return found


_OURS = frozenset(field.name for field in fields(Config))


def _is_of_inductor(name: str) -> bool:
    from torch._inductor import list_options

    return name in list_options()


def torch_backend(name: str) -> Callable[..., Any]:
    """A backend registered with `torch.compile`, by name; UsageError when there is none."""
    from torch._dynamo.backends.registry import list_backends, lookup_backend

    known = list_backends(exclude_tags=())
    if name not in known:
        raise UsageError(
            "DM106",
            f"unknown backend {name!r}",
            cure=f"use native, aot_eager, eager, a callable, or one of torch.compile's: {', '.join(sorted(known))}",
        )
    return lookup_backend(name)


def torch_backends() -> list[str]:
    """Names of the backends registered with `torch.compile`."""
    from torch._dynamo.backends.registry import list_backends

    return sorted(list_backends(exclude_tags=()))
