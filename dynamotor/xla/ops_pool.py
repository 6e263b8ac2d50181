"""Pooling of one to three dimensions: maximum (with indices), average, adaptive, and the inverses.

A pool goes along one dimension after the other. `_Taps` lists, for every output position, which input
positions it reads; regular windows become strided slices, adaptive ones a take. Among equals the first wins
and among NaN the last, as in aten's scan.

>>> torch.nn.functional.max_pool2d(x, 3, stride=2, padding=1, return_indices=True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .dtypes import is_float, per_dimension, wide
from .lowering import aten, op, rows


class _Taps(NamedTuple):
    """`positions[j, o]`: what output o reads in its j-th place; `valid[j, o]`: whether that is inside.
    `stride`: of a regular window, None otherwise. `reach[o]`: the window's length with its padding, which
    average pools divide by."""

    positions: np.ndarray
    valid: np.ndarray
    stride: int | None
    reach: np.ndarray


def _regular(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> _Taps:
    count = (
        size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)
    ) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1  # the last window would start in the right padding
    starts = np.arange(count) * stride - padding
    positions = starts[None, :] + np.arange(kernel)[:, None] * dilation
    reach = np.minimum(starts + kernel, size + padding) - starts
    return _Taps(positions, (positions >= 0) & (positions < size), stride, reach)


def _adaptive(size: int, count: int) -> _Taps:
    if count and size % count == 0:
        return _regular(size, size // count, size // count, 0, 1, False) if size else _empty(count)
    outputs = np.arange(count)
    starts, ends = outputs * size // max(count, 1), -((outputs + 1) * -size // max(count, 1))
    longest = int((ends - starts).max(initial=1))
    positions = starts[None, :] + np.arange(longest)[:, None]
    return _Taps(np.minimum(positions, size - 1), positions < ends, None, ends - starts)


def _empty(count: int) -> _Taps:
    return _Taps(np.zeros((1, count), int), np.zeros((1, count), bool), None, np.zeros(count, int))


def _reads(x: jax.Array, axis: int, taps: _Taps) -> Iterator[jax.Array]:
    """For each place in the window the values read along `axis` (negative): outside zero, or anything for
    irregular windows.
    """
    if taps.stride is None:
        for positions in taps.positions:
            yield jnp.take(x, positions, axis=axis)
        return
    low, high = -int(taps.positions.min(initial=0)), int(taps.positions.max(initial=0)) - x.shape[axis] + 1
    widths = [(0, 0, 0)] * x.ndim
    widths[axis] = (low, max(high, 0), 0)
    padded = jax.lax.pad(x, jnp.zeros((), x.dtype), widths) if low or high > 0 else x
    for positions in taps.positions + low:
        start, end = (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)
        yield jax.lax.slice_in_dim(padded, start, end, taps.stride, axis % x.ndim)


def _row(values: np.ndarray, axis: int) -> np.ndarray:
    """A vector along a negative axis, to broadcast."""
    return values.reshape(values.shape + (1,) * (-axis - 1))


# -- maximum -------------------------------------------------------------------------------------------------


def _max_along(
    x: jax.Array, index: jax.Array, axis: int, taps: _Taps, scale: int
) -> tuple[jax.Array, jax.Array]:
    """The maximum along an axis and where it was: `index` of that element + position * scale."""
    shifts = (_row((positions * scale).astype(np.int32), axis) for positions in taps.positions)
    places = (place + shift for place, shift in zip(_reads(index, axis, taps), shifts))
    reads = zip(_reads(x, axis, taps), places, taps.valid)
    best, where, seen = next(reads)
    for value, place, valid in reads:
        better = (value > best) | (value != value) | _row(~seen, axis)
        better = better & _row(valid, axis)
        best, where, seen = jnp.where(better, value, best), jnp.where(better, place, where), seen | valid
    return best, where


def _max_pool(x: jax.Array, all_taps: Sequence[_Taps]) -> tuple[jax.Array, jax.Array]:
    """Maxima and their linear positions within the pooled dimensions."""
    index, sizes = jnp.zeros((1,) * x.ndim, jnp.int32), x.shape[-len(all_taps) :]
    index = jnp.broadcast_to(index, x.shape)
    for back, taps in enumerate(reversed(all_taps), start=1):
        x, index = _max_along(x, index, -back, taps, math.prod(sizes[len(sizes) - back + 1 :]))
    return x, index


def _window_taps(x: jax.Array, spatial: int, kernel, stride, padding, dilation, ceil_mode) -> list[_Taps]:
    kernel = per_dimension(kernel, spatial)
    stride = per_dimension(stride, spatial) if stride else kernel
    rows = zip(
        x.shape[-spatial:], kernel, stride, per_dimension(padding, spatial), per_dimension(dilation, spatial)
    )
    return [_regular(*row, ceil_mode) for row in rows]


def _adaptive_taps(x: jax.Array, spatial: int, output_size) -> list[_Taps]:
    return [_adaptive(n, o) for n, o in zip(x.shape[-spatial:], per_dimension(output_size, spatial))]


def _to_indices(grad: jax.Array, shape: Sequence[int], indices: jax.Array, spatial: int) -> jax.Array:
    """Gradients added up at the positions that the maxima came from."""
    outer, inner = math.prod(shape[:-spatial]), math.prod(shape[-spatial:])
    rows = jnp.arange(outer)[:, None]
    flat = jnp.zeros((outer, inner), wide(grad).dtype)
    pooled = math.prod(grad.shape[-spatial:])
    return flat.at[rows, indices.reshape(outer, pooled)].add(wide(grad).reshape(outer, pooled)).reshape(shape)


def _backward_at_indices(spatial: int, grad, x, *rest):
    """The indices are the last argument."""
    return _to_indices(grad, x.shape, rest[-1], spatial)


def _unpool(spatial: int, x, indices, output_size, *_):
    """Values put back at their indices, zero elsewhere."""
    outer, inner = math.prod(x.shape[:-spatial]), math.prod(output_size)
    flat = (
        jnp.zeros((outer, inner), x.dtype)
        .at[jnp.arange(outer)[:, None], indices.reshape(outer, -1)]
        .set(x.reshape(outer, -1))
    )
    return flat.reshape(*x.shape[:-spatial], *output_size)


# -- average -------------------------------------------------------------------------------------------------


def _sum_along(x: jax.Array, axis: int, taps: _Taps) -> jax.Array:
    """The sum of each window along an axis."""
    places, count = taps.positions.shape
    if count == 1 and places == x.shape[axis] and taps.valid.all():
        return jnp.sum(x, axis=axis, keepdims=True)
    total: Any = 0
    for value, valid in zip(_reads(x, axis, taps), taps.valid):
        regular_or_full = taps.stride is not None or valid.all()
        total = total + (value if regular_or_full else jnp.where(_row(valid, axis), value, 0))
    return total


def _average(x: jax.Array, all_taps: Sequence[_Taps], divisor: np.ndarray | int) -> jax.Array:
    for back, taps in enumerate(reversed(all_taps), start=1):
        x = _sum_along(x, -back, taps)
    count = jnp.broadcast_to(jnp.asarray(divisor, x.dtype), x.shape)
    return x / count if is_float(x.dtype) else jax.lax.div(x, count)  # integers round to zero


def _counts(all_taps: Sequence[_Taps], with_padding: bool) -> np.ndarray:
    """How many positions each window has: the outer product of the counts along its dimensions."""
    counts = np.ones((), int)
    for taps in all_taps:
        counts = counts[..., None] * (taps.reach if with_padding else taps.valid.sum(0))
    return counts


def _avg_pool(
    spatial: int,
    x,
    kernel_size,
    stride=(),
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
):
    all_taps = _window_taps(x, spatial, kernel_size, stride, padding, 1, ceil_mode)
    return _average(wide(x), all_taps, divisor_override or _counts(all_taps, count_include_pad))


def _adaptive_avg_pool(spatial: int, x, output_size):
    all_taps = _adaptive_taps(x, spatial, output_size)
    return _average(wide(x), all_taps, _counts(all_taps, False))


def _backward_of(pool: Callable, grad: jax.Array, x: jax.Array) -> jax.Array:
    """The transpose of a pool of averages, which is linear."""
    return jax.linear_transpose(pool, jax.ShapeDtypeStruct(x.shape, wide(x).dtype))(wide(grad))[0]


# By the op's name: rules that take the number of dimensions first.
POOLS: dict[str, Callable] = {
    "max_pool{}d_with_indices": (
        lambda spatial, x, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False: _max_pool(
            x, _window_taps(x, spatial, kernel_size, stride, padding, dilation, ceil_mode)
        )
    ),
    "max_pool{}d_with_indices_backward": _backward_at_indices,
    "adaptive_max_pool{}d": (
        lambda spatial, x, output_size: _max_pool(x, _adaptive_taps(x, spatial, output_size))
    ),
    "adaptive_max_pool{}d_backward": _backward_at_indices,
    "max_unpool{}d": _unpool,
    "avg_pool{}d": _avg_pool,
    "avg_pool{}d_backward": (
        lambda spatial, grad, x, *window: _backward_of(lambda v: _avg_pool(spatial, v, *window), grad, x)
    ),
    "_adaptive_avg_pool{}d": _adaptive_avg_pool,
    "_adaptive_avg_pool{}d_backward": (
        lambda spatial, grad, x: _backward_of(
            lambda v: _adaptive_avg_pool(spatial, v, grad.shape[-spatial:]), grad, x
        )
    ),
}
rows(op, {getattr(aten, name.format(n)): partial(rule, n) for name, rule in POOLS.items() for n in (2, 3)})
