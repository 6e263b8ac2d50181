"""Scatter and its reductions: scatter, scatter_add, scatter_reduce, index_add, index_reduce.

>>> _scattered(jnp.zeros(3), 0, jnp.asarray([2, 2]), jnp.ones(2), "sum")
Array([0., 0., 2.], dtype=float64)

Half floats are reduced in float32 and rounded once. Indices out of range: see `ops_index.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .dtypes import is_complex, is_float
from .indexing import WITHIN, Index, along, at_dim, sum_dtype
from .lowering import aten, op, rows


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
