"""Reading and writing by index: gather, index, index_put, take, masked ops, index_select/add/copy/fill.

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

from .indexing import WITHIN, WRAPPED, Index, add_at, along, at_dim
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


@op(aten.repeat_interleave.Tensor)
def _repeat_interleave(repeats, *, output_size):
    return jnp.repeat(jnp.arange(repeats.size), repeats, total_repeat_length=output_size)
