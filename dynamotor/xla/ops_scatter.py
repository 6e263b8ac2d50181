"""Inverses and gradients of views: a new base with the written part in place, or zeros around a gradient.
Scatter and its reductions, where half floats are reduced in float32 and rounded once.

>>> _slice_scatter(jnp.zeros(4), jnp.ones(2), 0, 1, 3)
Array([0., 1., 1., 0.], dtype=float64)

A block is placed by dynamic_update_slice, elements that are apart by a select: both fuse, a scatter would
not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .dtypes import is_complex, is_float
from .lowering import aten, op, rows
from .ops_index import (
    WITHIN,
    Index,
    along,
    at_dim,
    flat_places,
    slice_bounds,
    strided_mask,
    strided_place,
    sum_dtype,
    unwindows,
)


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
    op,
    {
        (aten.scatter.value, aten.scatter.value_reduce): lambda x, dim, index, value, *, reduce=None: (
            _scattered(x, dim, index, jnp.asarray(value), _OLD_NAMES[reduce])
        ),
        aten.scatter_add: lambda x, dim, index, src: _scattered(x, dim, index, src, "sum"),
    },
)


@op(aten.index_add)
def _index_add(x, dim, index, source, *, alpha=1):
    source = source * jnp.asarray(alpha).astype(source.dtype) if alpha != 1 else source
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
