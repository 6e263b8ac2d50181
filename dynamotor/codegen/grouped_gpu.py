"""Runs `dynamotor::grouped_product` on a GPU by one Triton kernel, which is built at the first call and kept.

>>> grouped_product(x, w, offs, out=out)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..base import compat
from ..base.config import config
from ..graph.kernel_checks import tf32
from .gpu_kernels import launch
from .grouped_triton import Tile, rows_kernel, weights_kernel
from .triton_kernel import TritonFunction

Key = tuple[tuple[int, ...], tuple[int, ...]]  # a tensor's shape and strides
HALF = "half"
# By how float32 is multiplied, or halves.
TILES = {
    "tf32x3": Tile(128, 128, 32, apart=True),
    "bf16x6": Tile(128, 128, 32, apart=True),
    "tf32": Tile(128, 128, 32),
    "ieee": Tile(128, 128, 32, apart=True),
    HALF: Tile(128, 256, 64),
}
FEW = Tile(16, 64, 64, warps=4)  # for groups of few rows, whose weights' bytes take the time
FEW_ROWS = 16  # of a group, on average


def grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    """As `torch.ops.dynamotor.grouped_product.out`; nothing waits for the device. Rows behind the last group
    are zeros; aten leaves their memory as it was.
    """
    if out.numel() == 0:
        return out
    keys = [(tuple(t.shape), t.stride()) for t in (a, b, out)]
    kernel, turned = _kernel(out.device, out.dtype, precision(out.dtype), *keys)
    stream = (compat.current_raw_stream(out.device.index),) if out.device.type == "cuda" else ()
    kernel(*((b, a) if turned else (a, b)), offs if offs.stride(0) == 1 else offs.contiguous(), out, *stream)
    return out


def precision(dtype: torch.dtype) -> str:
    """A key of TILES: how numbers of a type are multiplied under the current settings."""
    if dtype != torch.float32:
        return HALF
    return "tf32" if tf32() else config.grouped_float32


@functools.lru_cache(maxsize=256)
def _kernel(
    device: torch.device, dtype: torch.dtype, how: str, a: Key, b: Key, out: Key
) -> tuple[Callable[..., None], bool]:
    """The kernel of operands with these shapes and strides, and whether it takes them in turned order."""
    f, numbers, turned = function_of(dtype, how, a, b, out)
    return launch(device, f, 4, numbers), turned


def function_of(
    dtype: torch.dtype, how: str, a: Key, b: Key, out: Key, tile: Tile | None = None
) -> tuple[TritonFunction, tuple[int, ...], bool]:
    """The function, its numbers, and whether its first operand is the second one."""
    if len(a[0]) == 3:  # groups of columns: rows of all three turned
        return *function_of(dtype, how, _turned(b), _turned(a), _turned(out), tile)[:2], True
    (rows, depth), columns = a[0], b[0][-1]
    if how == "auto":  # Units of tf32 take both operands in rows along the sum, those of bf16 any.
        how = "tf32x3" if a[1][1] == b[1][-2] == 1 else "bf16x6"
    strides = (*a[1], *b[1], *out[1])
    if len(b[0]) == 2:
        groups = out[0][0]
        size = (groups, rows, columns, depth)
        return weights_kernel(dtype, how, tile or TILES[how], size, strides), (*size, *strides), False
    groups = b[0][0]
    size = (groups, rows, columns, depth)
    tile = tile or (FEW if rows <= FEW_ROWS * groups else TILES[how])
    return rows_kernel(dtype, how, tile, size, strides), (*size, *strides), False


def _turned(key: Key) -> Key:
    """A tensor with its last two dimensions exchanged."""
    (*outer, m, n), (*steps, s, t) = key
    return (*outer, n, m), (*steps, t, s)
