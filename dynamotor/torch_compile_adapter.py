"""The bridge to `torch.compile`: our backend under its capture, and its backends under ours.

This is the one module of the package that may import what the project stands beside.
>>> torch.compile(model, backend="dynamotor")       # found through the package's entry point
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .autograd.aot import aot_compile
from .base.errors import UsageError
from .base.events import counters
from .codegen import compile_aten


def dynamotor_backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The `torch.compile` backend: differentiates and compiles a graph that `torch.compile` captured.

    Graphs with symbolic sizes run their captured operations in eager PyTorch (counted as a fallback).
    """
    if not all(isinstance(x, torch.Tensor) for x in example_inputs):
        counters["fallback"]["torch.compile: symbolic sizes"] += 1
        return gm.forward
    return aot_compile(gm, list(example_inputs), compile_aten)


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
