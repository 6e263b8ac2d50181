"""Reading and writing by index: gather, index, index_put, take, masked ops, index_select/add/copy/fill;
strided slices and sliding windows with their transposes; inverses of views, scatter and its reductions;
embedding tables and bags of their rows.

>>> _gather(jnp.asarray([[1, 2], [3, 4]]), 1, jnp.asarray([[1], [0]]))
Array([[2],
       [3]], dtype=int64)

An index out of range raises in aten. XLA has no way to raise: a read takes the nearest element, a write is
dropped. Negative indices count from the end only where aten lets them: in index, index_put, take and put.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .dtypes import LOW_PRECISION, is_complex, is_float, wide
from .lowering import Spec, aten, op, require, rows
from .promotion import cast


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
    },
)
op(aten.masked_fill, lift=True)(lambda x, mask, value: jnp.where(mask, cast(value, x.dtype), x))


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


# -- inverses of views, scatter and its reductions -----------------------------------------------------------


def _place(x: jax.Array, src: jax.Array, axis: int, first: int, step: int) -> jax.Array:
    """x with src at `first`, `first + step`, ... of an axis."""
    src = src.astype(x.dtype)
    if src.size == 0:
        return x
    if step == 1:
        return lax.dynamic_update_slice_in_dim(x, src, first, axis)
    mask = strided_mask(x.shape, axis, first, src.shape[axis], step)
    return jnp.where(mask, strided_place(src, axis, first, x.shape[axis], step), x)


@op(aten.slice_scatter)
def _slice_scatter(x, src, dim=0, start=None, end=None, step=1):
    dim %= x.ndim
    start, end = slice_bounds(x.shape[dim], start, end)
    shape = (*x.shape[:dim], -(-(end - start) // step), *x.shape[dim + 1 :])
    return _place(x, jnp.broadcast_to(src, shape), dim, start, step)


@op(aten.select_scatter)
def _select_scatter(x, src, dim, index):
    dim %= x.ndim
    return _place(x, jnp.expand_dims(src, dim), dim, index % x.shape[dim], 1)


@op(aten.diagonal_scatter)
def _diagonal_scatter(x, src, offset=0, dim1=0, dim2=1):
    """The two dimensions become a flat last one, where the diagonal is a strided slice."""
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows, columns = moved.shape[-2:]
    flat = moved.reshape(*moved.shape[:-2], rows * columns)
    placed = _place(flat, src, x.ndim - 2, offset if offset >= 0 else -offset * columns, columns + 1)
    return jnp.moveaxis(placed.reshape(moved.shape), (-2, -1), (dim1, dim2))


@op(aten.as_strided_scatter)
def _as_strided_scatter(x, src, size, stride, storage_offset=None):
    """Where elements of the view overlap, aten does not say which one stays."""
    places = flat_places(size, stride, storage_offset or 0)
    return x.reshape(-1).at[places].set(src.astype(x.dtype), **WITHIN).reshape(x.shape)


@op(aten.slice_inverse)
def _slice_inverse(x, src, dim=0, start=None, end=None, step=1):
    """The base from its slice, as functionalisation asks for it: the rest of the base is what `src` holds."""
    return _slice_scatter(src, x, dim, start, end, step)


@op(aten.unfold_backward)
def _unfold_backward(grad, input_sizes, dim, size, step):
    if not input_sizes:
        return grad.reshape(()) if size else jnp.zeros((), grad.dtype)
    dim %= len(input_sizes)
    return unwindows(jnp.moveaxis(grad, -1, dim), dim, input_sizes[dim], step)


# -- reductions into places ----------------------------------------------------------------------------------


def reduce_at(
    x: jax.Array, places: Index, src: jax.Array, reduce: str, include_self: bool = True
) -> jax.Array:
    """x with `src` reduced into the elements at `places`: reduce is sum, prod, mean, amax or amin.

    Without `include_self` the old value of an element that is written does not take part.
    """
    wide = sum_dtype(x.dtype) if reduce in ("sum", "prod", "mean") else x.dtype
    src = src.astype(x.dtype).astype(wide)
    base = x.astype(wide)
    if not include_self:
        base = base.at[places].set(_identity(reduce, base.dtype), **WITHIN)
    if reduce in ("amax", "amin"):
        write = base.at[places].max if reduce == "amax" else base.at[places].min
        return write(src, **WITHIN).astype(x.dtype)
    if reduce == "prod":
        return base.at[places].multiply(src, **WITHIN).astype(x.dtype)
    total = base.at[places].add(src, **WITHIN)
    if reduce == "mean":
        count = (
            jnp.full(x.shape, int(include_self))
            .at[places]
            .add(jnp.ones(src.shape, jnp.int64), **WITHIN)
            .clip(1)
        )
        total = (
            total / count.astype(wide) if is_float(total.dtype) or is_complex(total.dtype) else total // count
        )
    return total.astype(x.dtype)


def _identity(reduce: str, dtype: jnp.dtype) -> jax.Array:
    if reduce == "prod":
        return jnp.ones((), dtype)
    if reduce in ("sum", "mean"):
        return jnp.zeros((), dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(reduce == "amin")
    if is_float(dtype):
        return jnp.asarray(-jnp.inf if reduce == "amax" else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if reduce == "amax" else limits.max, dtype)


@op(aten.scatter_reduce.two)
def _scattered(
    x: jax.Array, dim: int, index: jax.Array, src: jax.Array, reduce: str | None, include_self: bool = True
) -> jax.Array:
    """aten's scatter: only the part of `src` that `index` covers is used; reduce None writes."""
    if index.size == 0:
        return x
    target, index = jnp.atleast_1d(x), jnp.atleast_1d(index)
    places = along(index, dim, target.ndim)
    if src.ndim:
        src = src[tuple(slice(n) for n in index.shape)]
    src = jnp.broadcast_to(src.astype(x.dtype), index.shape)
    result = (
        target.at[places].set(src, **WITHIN)
        if reduce is None
        else reduce_at(target, places, src, reduce, include_self)
    )
    return result.reshape(x.shape)


_OLD_NAMES = {None: None, "add": "sum", "multiply": "prod"}


@op(aten.scatter.src, aten.scatter.reduce)
def _scatter(x, dim, index, src, *, reduce=None):
    """Where an index occurs twice, aten does not say which element stays; on the CPU it is the last one."""
    return _scattered(x, dim, index, src, _OLD_NAMES[reduce])


rows(
    partial(op, lift=(float,)),
    {
        (aten.scatter.value, aten.scatter.value_reduce): lambda x, dim, index, value, *, reduce=None: (
            _scattered(x, dim, index, cast(value, x.dtype), _OLD_NAMES[reduce])
        ),
        aten.scatter_add: lambda x, dim, index, src: _scattered(x, dim, index, src, "sum"),
    },
)


@op(aten.index_add, lift=(float,))
def _index_add(x, dim, index, source, *, alpha=1):
    source = source * cast(alpha, source.dtype) if alpha != 1 else source
    return _rows(x, dim, index, source, "sum")


@op(aten.index_reduce)
def _rows(
    x: jax.Array, dim: int, index: jax.Array, source: jax.Array, reduce: str, include_self: bool = True
) -> jax.Array:
    target, index = jnp.atleast_1d(x), jnp.atleast_1d(index)
    if index.size == 0:
        return x
    dim %= target.ndim
    source = source.reshape(*target.shape[:dim], index.size, *target.shape[dim + 1 :])
    return reduce_at(target, at_dim(dim, index, target.ndim), source, reduce, include_self).reshape(x.shape)


# -- embedding tables ----------------------------------------------------------------------------------------


SUM, MEAN, MAX = 0, 1, 2


@op(aten.embedding)
def _embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    return weight.at[indices].get(**WITHIN)


@op(aten.embedding_renorm)
def _embedding_renorm(weight, indices, max_norm, norm_type):
    """Rows that are looked up are scaled down to a norm of at most `max_norm`."""
    rows = wide(weight.at[indices.reshape(-1)].get(**WITHIN))
    norm = jnp.linalg.norm(rows, norm_type, 1, keepdims=True)
    scaled = jnp.where(norm > max_norm, rows * (max_norm / (norm + 1e-7)), rows)
    return weight.at[indices.reshape(-1)].set(scaled.astype(weight.dtype), **WITHIN)


def add_rows(
    grad: jax.Array, indices: jax.Array, count: int, padding_idx: int, scale_grad_by_freq: bool
) -> jax.Array:
    """(count, columns): row i is the sum of the rows of `grad` (n, columns) whose index is i; the padding row
    stays zero.
    """
    rows = wide(grad)
    if scale_grad_by_freq:
        frequency = jnp.zeros(count, jnp.int32).at[indices].add(1, **WITHIN)
        rows = rows / frequency.at[indices].get(**WITHIN).astype(rows.dtype)[:, None]
    target = jnp.where(indices == padding_idx, count, indices) if padding_idx >= 0 else indices
    total = (
        jnp.zeros((count, rows.shape[1]), rows.dtype)
        .at[target]
        .add(rows, mode="drop", wrap_negative_indices=False)
    )
    return total.astype(grad.dtype)


@op(aten.embedding_dense_backward)
def _embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    return add_rows(
        grad.reshape(indices.size, grad.shape[-1]),
        indices.reshape(-1),
        num_weights,
        padding_idx,
        scale_grad_by_freq,
    )


@op(aten._embedding_bag, aten._embedding_bag_forward_only, out=True)
def _embedding_bag(
    weight, indices, offsets, scale_grad_by_freq=False, mode=SUM, sparse=False, per_sample_weights=None,
    include_last_offset=False, padding_idx=-1, *, out: tuple[Spec, ...],
):  # fmt: skip
    """(bags, bag of each index, size of each bag, index of the largest); the last three are cut to aten's
    shapes.
    """
    bags = out[0].shape[0]
    bag = _bag_of(offsets[:bags], indices.size)
    counted = indices != padding_idx
    rows = wide(weight.at[indices].get(**WITHIN))
    size = jnp.zeros(bags, jnp.int64).at[bag].add(counted, **WITHIN)
    largest = jnp.zeros((bags, weight.shape[1]), jnp.int64)
    if mode == MAX:
        value, largest = _largest(rows, indices, bag, counted, bags)
    else:
        rows = rows if per_sample_weights is None else rows * wide(per_sample_weights)[:, None]
        value = (
            jnp.zeros((bags, rows.shape[1]), rows.dtype)
            .at[bag]
            .add(jnp.where(counted[:, None], rows, 0), **WITHIN)
        )
        value = value / size.clip(1).astype(rows.dtype)[:, None] if mode == MEAN else value
    return value, *_extras(bag, size, largest, mode, out[1:])


def _largest(
    rows: jax.Array, indices: jax.Array, bag: jax.Array, counted: jax.Array, bags: int
) -> tuple[jax.Array, jax.Array]:
    """(largest value of each column of each bag, the table's row where it is): zeros for an empty bag."""
    shape = (bags, rows.shape[1])
    floor = jnp.where(counted[:, None], rows, -jnp.inf)
    value = jnp.full(shape, -jnp.inf, rows.dtype).at[bag].max(floor, **WITHIN)
    hit = (floor == value.at[bag].get(**WITHIN)) & counted[:, None]
    place = jnp.where(hit, jnp.arange(indices.size)[:, None], indices.size)
    first = jnp.full(shape, indices.size).at[bag].min(place, **WITHIN)
    found = first < indices.size
    padded = jnp.concatenate([indices.astype(jnp.int64), jnp.zeros(1, jnp.int64)])
    return jnp.where(found, value, 0), jnp.where(found, padded.at[first].get(**WITHIN), 0)


def _extras(
    bag: jax.Array, size: jax.Array, largest: jax.Array, mode: int, out: tuple[Spec, ...]
) -> tuple[jax.Array, ...]:
    """The inputs of the backward, in aten's shapes: sums need no sizes and get zeros."""

    def fit(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jnp.pad(x, [(0, max(0, n - have)) for n, have in zip(shape, x.shape)])[
            tuple(slice(n) for n in shape)
        ]

    counts = jnp.zeros_like(size) if mode == SUM else size
    return (
        fit(bag, out[0].shape),
        fit(counts, out[1].shape),
        fit(largest if mode == MAX else counts, out[2].shape),
    )


@op(aten._embedding_bag_dense_backward)
def _embedding_bag_dense_backward(
    grad,
    indices,
    offset2bag,
    bag_size,
    largest,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx=-1,
):
    grad = wide(grad)
    if mode == MAX:
        used = (bag_size[: grad.shape[0]] > 0)[:, None]
        rows = jnp.where(used, largest[: grad.shape[0]], num_weights)
        columns = jnp.arange(grad.shape[1])[None]
        return jnp.zeros((num_weights, grad.shape[1]), grad.dtype).at[rows, columns].add(grad, mode="drop")
    if mode == MEAN:
        grad = grad / bag_size[: grad.shape[0]].clip(1).astype(grad.dtype)[:, None]
    rows = grad.at[offset2bag].get(**WITHIN)
    rows = rows if per_sample_weights is None else rows * wide(per_sample_weights)[:, None]
    return add_rows(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


@op(aten._embedding_bag_backward)
def _embedding_bag_backward(
    grad, indices, offsets, offset2bag, bag_size, largest, num_weights, scale_grad_by_freq, mode, sparse,
    per_sample_weights, padding_idx=-1,
):  # fmt: skip
    require(not sparse, "XLA has no sparse gradients")
    bag = _bag_of(offsets[: grad.shape[0]], indices.size)
    return _embedding_bag_dense_backward(
        grad,
        indices,
        bag,
        bag_size,
        largest,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


def _bag_of(offsets: jax.Array, count: int) -> jax.Array:
    """Which bag each of `count` indices is in: the last one that starts at or before it."""
    return jnp.searchsorted(offsets, jnp.arange(count), side="right") - 1


@op(aten._embedding_bag_per_sample_weights_backward)
def _embedding_bag_per_sample_weights_backward(
    grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1
):
    rows = wide(weight.at[indices].get(**WITHIN)) * wide(grad.at[offset2bag].get(**WITHIN))
    return jnp.where(indices != padding_idx, rows.sum(1), 0)
