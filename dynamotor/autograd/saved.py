"""Saved values keep their layout between forward and backward, or the backward would read other
memory.

Hooks for saved tensors give back any tensor. `weight.data = ...` between forward and backward shows in
the saved weight itself, in eager too; but eager's saved values derived from it keep the old
data, and here may be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from dynamotor import _C

from ..base.errors import BackendError
from ..graph.spec import copy_as, is_lazy

# lie_as_noted(tensors, tensor_layouts(tensors)): they lie where and as they did
tensor_layouts, lie_as_noted = _C.tensor_layouts, _C.lie_as_noted


_WRITTEN = "modified by an inplace operation"
_NOTE = (
    "a compiled graph may keep its input for the backward where eager keeps a value made of it: write into "
    "the input (or another view of its memory) after the backward, or clone() it first (dynamotor, DM410)"
)


def note_write(error: RuntimeError) -> None:
    """Say on PyTorch's error about a saved tensor that was written why eager may not raise it."""
    if _WRITTEN in str(error):
        error.add_note(_NOTE)


class _Layout(NamedTuple):
    storage: int
    kind: Any  # stands for dtype and device
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def as_they_lay(
    tensors: Sequence[torch.Tensor], layouts: bytes | tuple[Any, ...], packed: Any
) -> list[torch.Tensor]:
    """The tensors, each in its sizes and strides of `layouts`; copied where hooks gave one that is
    otherwise. `packed`: a context's `_raw_saved_tensors`.

    Raises BackendError where sizes, dtypes or devices differ, and where one that no hook gave has another
    storage.
    """
    parts = zip(tensors, _parts(tensor_layouts(tensors)), _parts(layouts), packed, strict=True)
    return [_again(*one) for one in parts]


def _parts(layouts: bytes | tuple[Any, ...]) -> Iterator[_Layout]:
    if isinstance(layouts, tuple):
        yield from [_Layout(*one) for one in layouts]
        return
    words, at = memoryview(layouts).cast("q"), 0
    while at < len(words):
        storage, _, kind, ndim = words[at : at + 4]
        strides, at = at + 4 + ndim, at + 4 + 2 * ndim
        yield _Layout(storage, kind, tuple(words[strides - ndim : strides]), tuple(words[strides:at]))


def _again(tensor: torch.Tensor, now: _Layout, then: _Layout, packed: Any) -> torch.Tensor:
    other = now[1:3] != then[1:3]
    dtype, device = (
        tensor.dtype,
        tensor.device,
    )  # `refuse` may become a hook of the graph: it must not hold the tensor

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise BackendError(
            "DM407",
            f"a tensor of sizes {then.sizes} saved for the backward "
            + (f"is {dtype} {now.sizes} on {device} now" if other else "has other data now"),
            why="hooks for saved tensors gave another one back, or its `.data` was replaced",
            cure="keep sizes, dtype and device, replace data after the backward, or run the function eager "
            "(dynamotor.disable)",
        )

    if other or now.storage != then.storage and not _has_hooks(packed, refuse):
        refuse(tensor)
    return laid(tensor, then.strides)


def _has_hooks(packed: Any, refuse: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether hooks give this saved tensor; if not, it is refused from now on."""
    try:
        packed.register_hooks(torch.Tensor.detach, refuse)
    except RuntimeError:  # it has some
        return True
    return False


def laid(tensor: torch.Tensor, strides: tuple[Any, ...]) -> torch.Tensor:
    """The tensor, or a copy of it, with these strides, in elements."""
    return tensor if tensor.stride() == strides and not is_lazy(tensor) else copy_as(tensor, strides)
