"""What surrounds each call of compiled code: autocast and gradients are off in it, and what it writes is told
to PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dynamotor import _C

from ..base import compat

Compiled = Callable[..., Any]
_set_grad_enabled = compat.set_grad_enabled
_is_grad_enabled = torch.is_grad_enabled


def bump(tensors: list[torch.Tensor]) -> None:
    """Generated code writes without PyTorch seeing it: tell the version counters (inference tensors have
    none).
    """
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def call_without_grad(compiled: Compiled, inputs: tuple, mutated: tuple[int, ...]) -> tuple:
    """Call it with gradients off; `mutated` are the places of inputs that it writes."""
    before = _is_grad_enabled()
    _set_grad_enabled(False)
    try:
        values = compiled(*inputs)
        if mutated:
            bump([inputs[i] for i in mutated])
    finally:
        _set_grad_enabled(before)
    return values


def with_versions(compiled: Compiled, versions: Mapping[int, int]) -> Compiled:
    """Results that in-place ops made have the version that those give: a result's place -> their number. It
    is set before a backward keeps the result.
    """
    if not versions:
        return compiled

    def run(*inputs: Any) -> Any:
        values = compiled(*inputs)
        known = {values[k]: n for k, n in versions.items() if not values[k].is_inference()}
        compat.set_version_counter(tuple(known), tuple(known.values()))
        return values

    return run


def _autocast_regions() -> list[str]:
    """Device types for which an autocast region is open."""
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


def without_autocast(compiled: Compiled) -> Compiled:
    """The casts are in the graph already: the compiled ops must not be cast again by the region around the
    call.
    """
    if not _autocast_regions():
        return compiled
    return lambda *inputs: call_without_autocast(compiled, inputs)


def call_without_autocast(compiled: Compiled, inputs: tuple) -> Any:
    """Call it with autocast off."""
    if not _autocast_regions():
        return compiled(*inputs)
    with no_autocast():
        return compiled(*inputs)


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """What runs inside runs in the types that were chosen, whatever region surrounds it."""
    regions = _autocast_regions()
    for kind in regions:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in regions:
            torch.set_autocast_enabled(kind, True)


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called while torch.compile does not look: compiled autograd runs a backward under its
    frame hook.
    """
    call = _C.Dispatcher(None, function, "backward")
    call.disabled = True
    return call
