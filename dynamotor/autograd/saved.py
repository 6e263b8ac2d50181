"""What a backward gets back of what its forward saved lies as it lay then, or the backward would read other memory.

Hooks for saved tensors give back what they like, and `weight.data = ...` between forward and backward shows in
what is saved of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dynamotor import _C

from ..base.errors import BackendError
from ..graph.spec import is_lazy

# tensor_layouts(tensors) -> equal where the tensors lie alike
tensor_layouts = _C.tensor_layouts


def as_they_lay(tensors: Sequence[torch.Tensor], layouts: bytes | tuple) -> list[torch.Tensor]:
    """The tensors, each in its sizes and strides of `layouts`; copied where it lies otherwise. Raises BackendError
    where sizes, dtypes or devices differ.
    """
    parts = zip(tensors, _parts(tensor_layouts(tensors)), _parts(layouts), strict=True)
    return [_again(tensor, now, then) for tensor, now, then in parts]


def _parts(layouts: bytes | tuple) -> Iterator[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
    """What stands for dtype and device, sizes and strides of each tensor."""
    if isinstance(layouts, tuple):
        yield from layouts
        return
    words, at = memoryview(layouts).cast("q"), 0
    while at < len(words):
        dtype, dims = words[at + 1], at + 3
        strides, at = dims + words[at + 2], dims + 2 * words[at + 2]
        yield dtype, tuple(words[dims:strides]), tuple(words[strides:at])


def _again(tensor: torch.Tensor, now: tuple, then: tuple) -> torch.Tensor:
    if now[:2] != then[:2]:
        raise BackendError(
            "DM407",
            f"a tensor of sizes {then[1]} saved for the backward is {tensor.dtype} {now[1]} on {tensor.device} now",
            why="hooks for saved tensors gave another one back, or its `.data` was replaced",
            cure="keep sizes, dtype and device, or run the function eager (dynamotor.disable)",
        )
    return laid(tensor, *then[1:])


def laid(tensor: torch.Tensor, sizes: tuple[Any, ...], strides: tuple[Any, ...]) -> torch.Tensor:
    """The tensor of these sizes, or a copy of it, with these strides, in elements."""
    if tensor.stride() == strides and not is_lazy(tensor):
        return tensor
    once = tensor[tuple([slice(None if stride else 1) for stride in strides])]  # expanded ones lie there once
    return once.new_empty_strided(once.shape, strides).copy_(once).as_strided(sizes, strides)
