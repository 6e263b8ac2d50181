"""Reading and writing by index: gather, index, index_put, take, masked ops, index_select/add/copy/fill;
strided slices and sliding windows with their transposes.

>>> _gather(jnp.asarray([[1, 2], [3, 4]]), 1, jnp.asarray([[1], [0]]))
Array([[2],
       [3]], dtype=int64)

An index out of range raises in aten. XLA has no way to raise: a read takes the nearest element, a write is
dropped. Negative indices count from the end only where aten lets them: in index, index_put, take and put.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .dtypes import LOW_PRECISION
from .lowering import aten, op, require, rows


@op(aten.gather)
def _gather(x, dim, index, *, sparse_grad=False):
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    source, places = jnp.atleast_1d(x), jnp.atleast_1d(index)
    return source.at[along(places, dim, source.ndim)].get(**WITHIN).reshape(index.shape)


@op(aten.index_select)
def _index_select(x, dim, index):
    if x.ndim == 0:
        return jnp.broadcast_to(x, index.shape).reshape(())
    return x.at[at_dim(dim, jnp.atleast_1d(index), x.ndim)].get(**WITHIN)


@op(aten.put)
def _put(x, index, source, accumulate=False):
    flat, values = x.reshape(-1), source.reshape(index.shape)
    written = add_at(flat, (index,), values, WRAPPED) if accumulate else flat.at[index].set(values, **WRAPPED)
    return written.reshape(x.shape)


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (jnp.bool_, jnp.uint8)


def _places(indices: Sequence[jax.Array | None]) -> Index:
    """Numpy index of aten's list; None takes the whole dimension."""
    require(
        not any(_is_mask(index) for index in indices),
        "how many elements a boolean mask selects is known only from its data",
    )
    return tuple(slice(None) if index is None else index for index in indices)


@op(aten.index_put, aten._unsafe_index_put, aten._index_put_impl)
def _index_put(x, indices, values, accumulate=False, unsafe=False):
    """One boolean mask becomes a select: the k-th value goes where the mask is true for the k-th time."""
    given = [index for index in indices if index is not None]
    if len(given) == 1 and _is_mask(given[0]):
        mask, new = _spread(
            x, given[0] != 0, next(i for i, index in enumerate(indices) if index is not None), values
        )
        return jnp.where(mask, x + new if accumulate else new, x)
    if accumulate:
        return add_at(x, _places(indices), values, WRAPPED)
    return x.at[_places(indices)].set(values.astype(x.dtype), **WRAPPED)


def _spread(x: jax.Array, mask: jax.Array, lead: int, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mask, values) that broadcast with x, for a mask over the dimensions from `lead` on.

    `values` broadcast to (leading dimensions, number of true elements, trailing dimensions), as in `x[:,
    mask] = values`.
    """
    trailing = x.ndim - lead - mask.ndim
    wide_mask = mask.reshape(mask.shape + (1,) * trailing)
    if values.ndim <= trailing:
        return wide_mask, values
    values = values.reshape((1,) * (lead + 1 + trailing - values.ndim) + values.shape)
    if values.shape[lead] <= 1:
        shape = (*values.shape[:lead], *(1,) * mask.ndim, *values.shape[lead + 1 :])
        return wide_mask, values.reshape(shape) if values.size else jnp.zeros(shape, values.dtype)
    rank = (jnp.cumsum(mask.reshape(-1)) - 1).clip(0, values.shape[lead] - 1).reshape(mask.shape)
    return wide_mask, values.at[at_dim(lead, rank, values.ndim)].get(**WITHIN)


@op(aten.index_copy)
def _index_copy(x, dim, index, source):
    """Where an index occurs twice, the last row stays: a small scatter finds each row's source, then one
    gather reads it.
    """
    if x.ndim == 0:
        return source.reshape(()) if index.size else x
    index, source = jnp.atleast_1d(index), source.reshape(_row_shape(x, dim, index))
    if index.size == 0:
        return x
    length = x.shape[dim]
    last = jnp.full(length, -1).at[index].max(jnp.arange(index.size), **WITHIN)
    rows = source.at[at_dim(dim, last.clip(0), x.ndim)].get(**WITHIN)
    return jnp.where(_in_dim(last >= 0, dim, x.ndim), rows, x)


def _row_shape(x: jax.Array, dim: int, index: jax.Array) -> tuple[int, ...]:
    return (*x.shape[: dim % x.ndim], index.size, *x.shape[dim % x.ndim + 1 :])


def _in_dim(vector: jax.Array, dim: int, ndim: int) -> jax.Array:
    """A vector as a tensor that broadcasts over all dimensions but one."""
    return lax.expand_dims(vector, [d for d in range(ndim) if d != dim % ndim])


rows(
    op,
    {
        aten.repeat_interleave.Tensor: lambda repeats, *, output_size: jnp.repeat(
            jnp.arange(repeats.size), repeats, total_repeat_length=output_size
        ),
        aten.take: lambda x, index: x.reshape(-1).at[index].get(**WRAPPED),
        (aten.index.Tensor, aten._unsafe_index): lambda x, indices: x.at[_places(indices)].get(**WRAPPED),
        aten.masked_fill: lambda x, mask, value: jnp.where(mask, jnp.asarray(value).astype(x.dtype), x),
    },
)


@op(aten.masked_scatter)
def _masked_scatter(x, mask, source):
    """The k-th true element takes the k-th element of `source`."""
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    if source.size == 0:
        return jnp.broadcast_to(x, shape)
    mask = jnp.broadcast_to(mask, shape)
    rank = (jnp.cumsum(mask.reshape(-1)) - 1).clip(0, source.size - 1).reshape(shape)
    return jnp.where(mask, source.reshape(-1).at[rank].get(**WITHIN), x)


@op(aten.masked_scatter_backward)
def _masked_scatter_backward(grad, mask, sizes):
    """The gradients of the true elements, in order, then zeros."""
    mask = jnp.broadcast_to(mask, grad.shape).reshape(-1)
    total = math.prod(sizes)
    target = jnp.where(mask, jnp.cumsum(mask) - 1, total)
    return jnp.zeros(total, grad.dtype).at[target].set(grad.reshape(-1), mode="drop").reshape(tuple(sizes))


@op(aten.nonzero_static)
def _nonzero_static(x, *, size, fill_value=-1):
    if x.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), 1)


# -- places --------------------------------------------------------------------------------------------------


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


def flat_places(size: Sequence[int], stride: Sequence[int], offset: int) -> jax.Array:
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
