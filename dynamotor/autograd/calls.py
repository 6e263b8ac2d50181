"""What surrounds each call of compiled code: autocast is off in it, and what it writes is told to PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Compiled = Callable[..., Any]


def bump(tensors: list[torch.Tensor]) -> None:
    """Generated code writes without PyTorch seeing it: tell the version counters (inference tensors have none)."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def _autocast_regions() -> list[str]:
    """Device types for which an autocast region is open."""
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


def without_autocast(compiled: Compiled) -> Compiled:
    """The casts are in the graph already: the compiled ops must not be cast again by the region around the call."""
    if not _autocast_regions():
        return compiled
    return lambda *inputs: call_without_autocast(compiled, inputs)


def call_without_autocast(compiled: Compiled, inputs: tuple) -> Any:
    """Call it with autocast off."""
    regions = _autocast_regions()
    if not regions:
        return compiled(*inputs)
    for kind in regions:
        torch.set_autocast_enabled(kind, False)
    try:
        return compiled(*inputs)
    finally:
        for kind in regions:
            torch.set_autocast_enabled(kind, True)
