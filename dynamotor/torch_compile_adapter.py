"""The bridge to `torch.compile`: our backend under its capture, and its backends under ours.

This is the one module of the package that may import what the project stands beside.
>>> torch.compile(model, backend="dynamotor")       # found through the package's entry point
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .autograd.aot import aot_compile
from .base.errors import UsageError
from .base.events import counters
from .codegen import compile_aten


def backend_for_torch_compile(backend: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """A backend `(gm, example_inputs) -> callable` of ours in the form that `torch.compile` calls.

    Graphs with symbolic sizes run their captured operations in eager PyTorch (counted as a fallback).
    """

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
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

    builder.VariableBuilder._wrap = wrap_plain


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
