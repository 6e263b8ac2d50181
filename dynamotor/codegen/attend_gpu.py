"""Runs `dynamotor::attend` on a GPU by two Triton kernels; they are built at the first call and kept.

>>> attend(q, k, v, mask, 0.125, q.stride(), out=out)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..base import compat
from . import attend_triton
from .gpu_kernels import launch
from .triton_kernel import TritonFunction

Key = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # a tensor's shape, strides and type
PROGRAMS = 4  # for each of a GPU's processors
INTERPRETED = 4  # programs that share a head's keys in Triton's interpreter
ALONE = 2  # blocks of keys that one program goes through: a kernel that joins parts takes 2 us, a block less
FEW = 1 << 21  # bytes of keys that are read whatever the mask shows


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    stride: Sequence[int],
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """As `torch.ops.dynamotor.attend.out`."""
    device = query.device
    tensors = (query, key, value, query if mask is None else mask)
    keys = [(t.shape, t.stride(), t.dtype) for t in tensors[: 3 if mask is None else 4]]
    first, second, room = _kernels(device, scale, out.stride(), *keys)
    stream = (compat.current_raw_stream(device.index),) if device.type == "cuda" else ()
    if second is None:
        first(*tensors, out, *stream)
    else:
        parts = torch.empty(room, dtype=torch.float32, device=device)
        first(*tensors, parts, *stream)
        second(parts, out, *stream)
    return out


def _strides(of: Sequence[Key], out: tuple[int, ...]) -> list[int]:
    """The strides of q, k, v, mask and the result; 0 along broadcast dimensions, and for no mask."""
    found = [
        0 if n == 1 else step for shape, strides, _ in of for n, step in zip(shape, strides, strict=True)
    ]
    return [*found, *([0] * (4 * (4 - len(of)))), *out]


@functools.lru_cache(maxsize=256)
def _kernels(
    device: torch.device, scale: float, out: tuple[int, ...], *of: Key
) -> tuple[Callable[..., None], Callable[..., None] | None, int]:
    """The kernel of tensors with these shapes, strides and types, one that puts parts together, and how many
    floats the parts are.
    """
    (shape, _, dtype), (keys, _, _), (values, _, _), *_ = of
    groups, rows, length = shape[0] * shape[1], shape[2], keys[2]
    block, _ = _tile(of)
    blocks = -(-length // block)
    n = max(1, min(_programs(device) // max(1, groups), blocks, attend_triton.MOST_SPLITS))
    n = 1 if blocks <= ALONE else n
    functions = functions_of(scale, out, n, of)
    numbers = (shape[1], length, n, *_strides(of, out))
    first = launch(device, replace(functions[0], grid=groups * n), 5, numbers)
    if n == 1:
        return first, None, 0
    second = launch(device, replace(functions[1], grid=groups * rows), 2, (shape[1], n, *out))
    return first, second, groups * n * rows * (values[3] + 2)


def functions_of(scale: float, out: tuple[int, ...], n: int, of: Sequence[Key]) -> list[TritonFunction]:
    """The function that goes through the keys, and with splits the one that puts their parts together."""
    (shape, _, dtype), _, (values, _, _), *masks = of
    widths = (shape[3], values[3])
    mask = masks[0][2] if masks else None
    tile = _tile(of)
    stages = 1 if tile[0] >= of[1][0][2] else attend_triton.STAGES  # one block is no loop
    first = attend_triton.parts(
        dtype, mask, shape[2], widths, _strides(of, out), n, scale, _are_few(of), tile, stages
    )
    return [first] if n == 1 else [first, attend_triton.joined(dtype, shape[2], widths[1])]


def _are_few(of: Sequence[Key]) -> bool:
    """Whether keys are read before it is known which of them count."""
    (shape, _, dtype), (keys, _, _), *_ = of
    return bool(shape[0] * shape[1] * keys[2] * shape[3] * dtype.itemsize <= FEW)


def _tile(of: Sequence[Key]) -> tuple[int, int]:
    """Keys of a block, and warps."""
    (shape, _, dtype), (keys, _, _), (values, _, _), *_ = of
    widths = (shape[3], values[3])
    if _are_few(of):
        return attend_triton.tile_of(dtype, widths, keys[2])
    return attend_triton.block_of(dtype, widths), attend_triton.WARPS


def _programs(device: torch.device) -> int:
    """How many keep a device busy."""
    if device.type != "cuda":
        return INTERPRETED
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
