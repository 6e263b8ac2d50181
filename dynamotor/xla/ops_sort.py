"""Sorting and order statistics; running sums, products and extrema along one dimension.

Every sort here is stable and puts nan last (first when descending). Where values are equal, aten's `topk`,
`median`, `kthvalue` and unstable `sort` may name another of the equal positions than these rules; the values
agree.

>>> torch.tensor([3, 1, 2], device="xla").sort(descending=True).indices
tensor([0, 2, 1], device='xla:0')
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .lowering import aten, op, rows
from .ops_pointwise import logaddexp
from .ops_reduce import in_dtype
from .promotion import widened_float


def sort(x: jax.Array, dim: int, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    """Values in order and their positions (int64), both of x's shape."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    places = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    if not descending:
        value, index = lax.sort((x, places), dimension=dim, is_stable=True, num_keys=1)
        return value, index
    # Turned round before and after, equal values keep their order.
    turned = lax.sort((jnp.flip(x, dim), jnp.flip(places, dim)), dimension=dim, is_stable=True, num_keys=1)
    return jnp.flip(turned[0], dim), jnp.flip(turned[1], dim)


@op(aten.topk)
def _topk(x, k, dim=-1, largest=True, sorted=True):
    """Always sorted; of equal values the first ones are taken."""
    if x.ndim == 0:
        return (x, jnp.zeros((), jnp.int64)) if k else (jnp.zeros((0,), x.dtype), jnp.zeros((0,), jnp.int64))
    rows = jnp.moveaxis(x, dim, -1)
    _, places = lax.top_k(_keys(rows, largest), k)
    values = jnp.take_along_axis(rows, places, -1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(places, -1, dim)


def _keys(x: jax.Array, largest: bool) -> jax.Array:
    """What to take the largest of. `top_k` orders by bits, where nan's sign counts: nan is first, or last for
    the smallest.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x if largest else ~x
    signed = jnp.copysign(jnp.asarray(jnp.nan, x.dtype), 1 if largest else -1)
    return jnp.where(x != x, signed, x if largest else -x)


def _pick(
    values: jax.Array, places: jax.Array, rank: jax.Array, dim: int, keepdim: bool
) -> tuple[jax.Array, jax.Array]:
    """The entries at `rank` (a number, or one a row with `dim` kept) of sorted values and positions."""
    if values.ndim == 0:
        return values, places
    shape = [1 if d == dim % values.ndim else size for d, size in enumerate(values.shape)]
    rank = jnp.broadcast_to(rank, shape)
    picked = jnp.take_along_axis(values, rank, dim), jnp.take_along_axis(places, rank, dim)
    return picked if keepdim else (jnp.squeeze(picked[0], dim), jnp.squeeze(picked[1], dim))


def _median(x: jax.Array, dim: int, keepdim: bool, skip_nan: bool) -> tuple[jax.Array, jax.Array]:
    """The lower of the two middle values. nan makes the median nan, unless it is skipped."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    values, places = sort(x, dim)
    numbers = jnp.sum(values == values, dim, keepdims=True)
    middle = (numbers - 1) // 2
    if not skip_nan:
        middle = jnp.where(numbers < x.shape[dim], numbers, (x.shape[dim] - 1) // 2)
    return _pick(values, places, jnp.maximum(middle, 0), dim, keepdim)


@op(aten.mode)
def _mode(x, dim=-1, keepdim=False):
    """The most frequent value, the smallest of equally frequent ones, and the position of its last
    occurrence.
    """
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    values, places = sort(x, dim)
    rank = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    before = jnp.roll(values, 1, dim)
    start = lax.cummax(jnp.where((rank == 0) | (values != before), rank, 0), dim)
    return _pick(values, places, jnp.argmax(rank - start, dim, keepdims=True), dim, keepdim)


# -- running -------------------------------------------------------------------------------------------------


rows(
    partial(op, out=True),
    {
        target: lambda x, dim, *, dtype=None, out, fn=fn: (
            fn(in_dtype(x, out), dim) if x.ndim else in_dtype(x, out)
        )
        for target, fn in ((aten.cumsum, jnp.cumsum), (aten.cumprod, jnp.cumprod))
    },
)


@op(aten._logcumsumexp, aten.logcumsumexp)
def _logcumsumexp(x, dim):
    x = widened_float(x)
    if x.ndim == 0:
        return x
    return (
        lax.associative_scan(logaddexp, x, axis=dim % x.ndim)
        if jnp.iscomplexobj(x)
        else lax.cumlogsumexp(x, dim % x.ndim)
    )


rows(
    op,
    {
        aten.sort.default: lambda x, dim=-1, descending=False: sort(x, dim, descending),
        aten.sort.stable: lambda x, *, stable=None, dim=-1, descending=False: sort(x, dim, descending),
        aten.kthvalue: lambda x, k, dim=-1, keepdim=False: _pick(
            *sort(x, dim), jnp.asarray(k - 1), dim, keepdim
        ),
        aten.median.default: lambda x: (
            _median(jnp.ravel(x), 0, False, False)[0] if x.size else jnp.asarray(jnp.nan)
        ),
        aten.nanmedian.default: lambda x: (
            _median(jnp.ravel(x), 0, False, True)[0] if x.size else jnp.asarray(jnp.nan)
        ),
        aten.median.dim: lambda x, dim, keepdim=False: _median(x, dim, keepdim, False),
        aten.nanmedian.dim: lambda x, dim, keepdim=False: _median(x, dim, keepdim, True),
        aten.cummax: lambda x, dim: _running(lambda new, old: new >= old, x, dim),
        aten.cummin: lambda x, dim: _running(lambda new, old: new <= old, x, dim),
    },
)


def _running(wins: Any, x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """The running extremum and its position: the last of equal ones; once nan, always nan."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim

    def later(left, right):
        (old, old_at), (new, new_at) = left, right
        take = (new != new) | ((old == old) & wins(new, old))
        return jnp.where(take, new, old), jnp.where(take, new_at, old_at)

    return lax.associative_scan(later, (x, lax.broadcasted_iota(jnp.int64, x.shape, dim)), axis=dim)
