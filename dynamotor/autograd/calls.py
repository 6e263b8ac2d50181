"""Around each call of compiled code: autocast and gradients are off in it, and its writes are told
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


def call_without_grad(compiled: Compiled, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call it with gradients off."""
    before = _is_grad_enabled()
    _set_grad_enabled(False)
    try:
        return compiled(*inputs)
    finally:
        _set_grad_enabled(before)


def with_versions(compiled: Compiled, mutated: Mapping[int, int], versions: Mapping[int, int]) -> Compiled:
    """Generated code writes without PyTorch seeing it: version counters are set to what eager's in-place ops
    make them (inference tensors have none), before a backward keeps a tensor.

    mutated: an input's place -> how many ops write it. versions: a result's place -> how many ops made it.
    """
    if not versions and not mutated:
        return compiled

    def run(*inputs: Any) -> Any:
        targets = [(inputs[i], n) for i, n in mutated.items() if not inputs[i].is_inference()]
        tensors = [tensor for tensor, _ in targets]
        numbers = [tensor._version + n for tensor, n in targets]
        try:
            values = compiled(*inputs)
        except BaseException:
            compat.set_version_counter(tuple(tensors), tuple(numbers))  # some of the writes may be done
            raise
        for k, n in versions.items():
            if not values[k].is_inference():
                tensors.append(values[k])
                numbers.append(n)
        compat.set_version_counter(tuple(tensors), tuple(numbers))
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


def call_without_autocast(compiled: Compiled, inputs: tuple[Any, ...]) -> Any:
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
