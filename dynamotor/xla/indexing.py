"""Where elements are: strided slices and sliding windows of one dimension with their transposes, and numpy
indices for gathers.

>>> windows(jnp.arange(5), 0, size=3, step=2)       # one row per place in the window, one column per window
Array([[0, 2],
       [1, 3],
       [2, 4]], dtype=int64)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .dtypes import LOW_PRECISION

WITHIN: dict[str, Any] = {
    "mode": "promise_in_bounds",
    "wrap_negative_indices": False,
}  # no code for indices that aten refuses
WRAPPED: dict[str, Any] = {"mode": "promise_in_bounds", "wrap_negative_indices": True}
Index = tuple[Any, ...]
_FEW = 32  # windows up to this size are slices, which XLA fuses; larger ones one gather


def at_dim(dim: int, index: jax.Array, ndim: int) -> Index:
    """Numpy index that reads or writes `index` of one dimension."""
    return (*[slice(None)] * (dim % ndim), index)


def along(index: jax.Array, dim: int, ndim: int) -> Index:
    """Numpy index of aten's gather and scatter: `index` in one dimension, the element's own place in the
    others.
    """
    places: list[Any] = []
    for d in range(ndim):
        shape = [1] * ndim
        shape[d] = index.shape[d]
        places.append(index if d == dim % ndim else lax.broadcasted_iota(jnp.int64, shape, d))
    return tuple(places)


def sum_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The type that elements of a type are added in."""
    return jnp.dtype(jnp.float32 if dtype in LOW_PRECISION else jnp.int32 if dtype == jnp.bool_ else dtype)


def add_at(x: jax.Array, places: Index, values: jax.Array, rules: dict[str, Any]) -> jax.Array:
    """x with `values` added at `places`, which may repeat: half floats are added in float32 and rounded once,
    bools are or-ed.
    """
    dtype = sum_dtype(x.dtype)
    return x.astype(dtype).at[places].add(values.astype(dtype), **rules).astype(x.dtype)


def flat_places(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> jax.Array:
    """Flat positions of the elements of a strided view, int64, in the shape of the view."""
    steps = (lax.broadcasted_iota(jnp.int64, tuple(size), d) * s for d, s in enumerate(stride))
    return sum(steps, jnp.full(tuple(size), offset, jnp.int64))


def slice_bounds(length: int, start: int | None, end: int | None) -> tuple[int, int]:
    """(start, end) of aten's slice: negative ones count from the end, both are clamped, end is never before
    start.
    """
    start, end, _ = slice(start, end).indices(length)
    return start, max(start, end)


def strided_slice(x: jax.Array, axis: int, first: int, length: int, step: int) -> jax.Array:
    """`length` elements of an axis, from `first` on, `step` apart."""
    return lax.slice_in_dim(x, first, first + (length - 1) * step + 1 if length else first, step, axis)


def strided_place(x: jax.Array, axis: int, first: int, total: int, step: int) -> jax.Array:
    """Transpose of `strided_slice`: zeros with an axis of `total` elements, and x at `first`, `first + step`,
    ...
    """
    length = x.shape[axis]
    shape = (*x.shape[:axis], total, *x.shape[axis + 1 :])
    if x.size == 0:
        return jnp.zeros(shape, x.dtype)
    padding = [(0, 0, 0)] * x.ndim
    padding[axis] = (first, total - first - (length - 1) * step - 1, step - 1)
    return lax.pad(x, jnp.zeros((), x.dtype), padding)


def strided_mask(shape: tuple[int, ...], axis: int, first: int, length: int, step: int) -> jax.Array:
    """Whether an element of `shape` belongs to that slice."""
    place = lax.broadcasted_iota(jnp.int32, shape, axis) - first
    return (place >= 0) & (place < length * step) & (place % step == 0)


def windows(x: jax.Array, axis: int, size: int, step: int, dilation: int = 1) -> jax.Array:
    """Sliding windows of an axis: the axis becomes two, (place in the window, window)."""
    count = (x.shape[axis] - dilation * (size - 1) - 1) // step + 1
    if size == 0:
        return jnp.zeros((*x.shape[:axis], 0, x.shape[axis] // step + 1, *x.shape[axis + 1 :]), x.dtype)
    if size <= _FEW:
        return jnp.stack([strided_slice(x, axis, k * dilation, count, step) for k in range(size)], axis)
    places = flat_places((size, count), (dilation, step), 0)
    return x.at[at_dim(axis, places, x.ndim)].get(**WITHIN)


def unwindows(g: jax.Array, axis: int, total: int, step: int, dilation: int = 1) -> jax.Array:
    """Transpose of `windows`: axes (place in the window, window) become one of `total` elements, overlapping
    ones are added.
    """
    size, count = g.shape[axis : axis + 2]
    shape = (*g.shape[:axis], total, *g.shape[axis + 2 :])
    if g.size == 0:
        return jnp.zeros(shape, g.dtype)
    if size > _FEW:
        places = flat_places((size, count), (dilation, step), 0)
        return jnp.zeros(shape, g.dtype).at[at_dim(axis, places, len(shape))].add(g, **WITHIN)
    rows = (lax.index_in_dim(g, k, axis, keepdims=False) for k in range(size))
    placed = [strided_place(row, axis, k * dilation, total, step) for k, row in enumerate(rows)]
    return sum(placed[1:], placed[0])
