"""Reductions: sums, products, extrema and their positions, moments, norms, distances between rows. Sorting
and order statistics; running sums, products and extrema along one dimension.

`dim=None` and `dim=[]` reduce everything; a 0-d tensor accepts dim 0 and -1, as aten does. nan wins over
every other extremum, and of equal extrema the first has the position.

>>> torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="xla").sum(1)
tensor([3., 7.], device='xla:0')
"""

from __future__ import annotations

import math
from functools import partial
from math import inf, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.scipy import special

from .dtypes import jax_dtype, wide
from .lowering import Spec, aten, op, rows
from .ops_decomposed import parts_of
from .ops_pointwise import logaddexp, truth
from .promotion import cast, compute_dtype, promoted, widened_float


def axes(x: jax.Array, dim: Any = None) -> tuple[int, ...]:
    """The axes that aten's `dim` names: all for None and [], none for a 0-d tensor."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.ndim for d in dims) if x.ndim else ()


def in_dtype(x: jax.Array, out: Spec) -> jax.Array:
    """A tensor in the type that a result of `out`'s dtype is accumulated in."""
    return cast(x, compute_dtype(out.dtype))


# -- extrema -------------------------------------------------------------------------------------------------


@op(aten.amax)
def _amax(x, dim=None, keepdim=False):
    return jnp.max(x, axes(x, dim), keepdims=keepdim)


@op(aten.amin)
def _amin(x, dim=None, keepdim=False):
    return jnp.min(x, axes(x, dim), keepdims=keepdim)


def _position(find: Any, x: jax.Array, dim: int | None, shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, jnp.int64) if x.ndim == 0 else find(x, dim).reshape(shape)


rows(
    partial(op, out=True),
    {
        **{
            target: lambda x, dim=None, keepdim=False, *, dtype=None, out, fn=fn: fn(
                in_dtype(x, out), axes(x, dim), keepdims=keepdim
            )
            for target, fn in {
                aten.sum: jnp.sum,
                aten.prod: jnp.prod,
                aten.mean: jnp.mean,
                aten.logsumexp: special.logsumexp,
            }.items()
        },
        aten.argmax: lambda x, dim=None, keepdim=False, *, out: _position(jnp.argmax, x, dim, out.shape),
        aten.argmin: lambda x, dim=None, keepdim=False, *, out: _position(jnp.argmin, x, dim, out.shape),
        aten.max.dim: lambda x, dim, keepdim=False, *, out: (
            _amax(x, dim, keepdim),
            _position(jnp.argmax, x, dim, out[1].shape),
        ),
        aten.min.dim: lambda x, dim, keepdim=False, *, out: (
            _amin(x, dim, keepdim),
            _position(jnp.argmin, x, dim, out[1].shape),
        ),
    },
)


# -- moments -------------------------------------------------------------------------------------------------


def moments(x: jax.Array, dim: Any, correction: float | None, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    """Variance and mean in two passes. `correction`: subtracted from the number of elements, 1 for None."""
    x, over = wide(x), axes(x, dim)
    mean = jnp.mean(x, over, keepdims=True)
    away = x - mean
    squares = away.real**2 + away.imag**2 if jnp.iscomplexobj(x) else away * away
    divisor = max(prod(x.shape[a] for a in over) - (1 if correction is None else correction), 0)
    total = jnp.sum(squares, over, keepdims=keepdim)
    return total / np.asarray(divisor, total.dtype), mean if keepdim else jnp.squeeze(mean, over)


rows(
    op,
    {
        (aten.aminmax, aten._aminmax): lambda x, dim=None, keepdim=False: (
            _amin(x, dim, keepdim),
            _amax(x, dim, keepdim),
        ),
        aten.linalg_vector_norm: lambda x, ord=2, dim=None, keepdim=False, *, dtype=None: vector_norm(
            _normed(x, dtype), ord, dim, keepdim
        ),
        aten.any: lambda x, dim=None, keepdim=False: jnp.any(truth(x), axes(x, dim), keepdims=keepdim),
        aten.all: lambda x, dim=None, keepdim=False: jnp.all(truth(x), axes(x, dim), keepdims=keepdim),
        aten.max.default: lambda x: jnp.max(x),
        aten.min.default: lambda x: jnp.min(x),
        aten.var.correction: lambda x, dim=None, *, correction=None, keepdim=False: moments(
            x, dim, correction, keepdim
        )[0],
        aten.var_mean.correction: lambda x, dim=None, *, correction=None, keepdim=False: moments(
            x, dim, correction, keepdim
        ),
    },
)


# -- norms ---------------------------------------------------------------------------------------------------


def power_sum(x: jax.Array, order: float, over: tuple[int, ...], keepdim: bool) -> jax.Array:
    """Σ |x|^order, before the root; for the order 0 the number of elements that are not zero."""
    if order == 0:
        return jnp.sum(x != 0, over, keepdims=keepdim).astype(jnp.abs(x).dtype)
    if order == 2:
        squares = x.real**2 + x.imag**2 if jnp.iscomplexobj(x) else x * x
        return jnp.sum(squares, over, keepdims=keepdim)
    size = jnp.abs(x)
    return jnp.sum(size if order == 1 else size**order, over, keepdims=keepdim)


def vector_norm(x: jax.Array, order: float | None, dim: Any = None, keepdim: bool = False) -> jax.Array:
    """(Σ |x|^order)^(1/order) over `dim`; the largest and smallest magnitude for inf and -inf. Reals of x's
    precision.
    """
    over, order = axes(x, dim), 2.0 if order is None else float(order)
    if abs(order) == inf:
        return (jnp.max if order > 0 else jnp.min)(jnp.abs(x), over, keepdims=keepdim)
    total = power_sum(x, order, over, keepdim)
    if order in (0, 1):
        return total
    return jnp.sqrt(total) if order == 2 else total ** (1 / order)


def _normed(x: jax.Array, dtype: torch.dtype | None) -> jax.Array:
    """aten casts the input to `dtype` before it takes the norm."""
    if dtype is not None:
        x = x.astype(jax_dtype(dtype))
    return wide(x)


@op(aten.linalg__powsum)
def _powsum(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    x = _normed(x, dtype)
    return power_sum(x, float(ord), axes(x, dim), keepdim)


def _all_but(x: jax.Array, dim: int) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != dim % x.ndim)


@op(aten._weight_norm_interface_backward)
def _weight_norm_backward(grad, v, g, norms, dim):
    """Of w = v * g / norm(v), the norm over all dimensions but `dim`."""
    grad, v, g, norms = wide(grad), wide(v), wide(g), wide(norms).reshape(g.shape)
    along = jnp.sum(grad * v, axis=_all_but(v, dim), keepdims=True)
    return (g / norms) * (grad - v * along / jnp.square(norms)), along / norms


op(aten.batch_norm_update_stats)(
    lambda x, running_mean, running_var, momentum: moments(x, _all_but(x, 1), 0, False)[::-1]
)


# -- histograms ----------------------------------------------------------------------------------------------


@op(aten.histc)
def _histc(x, bins=100, min=0, max=0):
    """Counts in equal bins over [min, max], or over the data's range where both are equal; the rest does not
    count.
    """
    kept = x.dtype
    x = jnp.ravel(x)
    x = x if jnp.issubdtype(kept, jnp.floating) else x.astype(jnp.float64)
    low, high = (jnp.asarray(v, x.dtype) for v in (min, max))
    if min == max and x.size:
        low, high = jnp.min(x), jnp.max(x)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    place = jnp.floor((x - low) * bins / (high - low))
    place = jnp.where(x == high, bins - 1, place)
    inside = (x >= low) & (x <= high)
    counts = (
        jnp.zeros(bins, jnp.int64).at[jnp.where(inside, place, bins).astype(jnp.int64)].add(1, mode="drop")
    )
    return counts.astype(kept)


def _bucket(edges: jax.Array, values: jax.Array, right: bool) -> jax.Array:
    return jnp.searchsorted(edges, values, side="right" if right else "left")


@op(aten.bucketize)
def _bucketize(values, boundaries, *, out_int32=False, right=False):
    values, boundaries = promoted(jnp.asarray(values), boundaries)
    return _bucket(boundaries, values, right)


@op(aten.searchsorted)
def _searchsorted(sequence, values, *, out_int32=False, right=False, side=None, sorter=None):
    """The rows of `sequence` are searched with the rows of `values`; one row serves values of every shape."""
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    sequence, values = promoted(sequence, jnp.asarray(values))
    right = right or side == "right"
    if sequence.ndim == 1:
        return _bucket(sequence, values, right)
    rows, shape = prod(sequence.shape[:-1]), values.shape
    search = jax.vmap(lambda edges, row: _bucket(edges, row, right))
    return search(sequence.reshape(rows, -1), values.reshape(rows, -1)).reshape(shape)


# -- distances between rows ----------------------------------------------------------------------------------


_AUTO, _PRODUCT, _DIFFERENCE = (
    0,
    1,
    2,
)  # compute_mode of cdist: from 26 rows on, by a product, or by differences
_FEW_ROWS = 25


def _slope(difference: jax.Array, distance: jax.Array, p: float) -> jax.Array:
    """The derivative of the norm in the difference; zero where the distance is, as aten's."""
    distance, size, sign = distance[..., None], jnp.abs(difference), jnp.sign(difference)
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return sign
    if math.isinf(p):
        return jnp.where(size == distance, sign, 0)
    safe = jnp.where(distance == 0, 1, distance)
    if p == 2:
        return jnp.where(distance == 0, 0, difference / safe)
    flat = (distance == 0) | ((size == 0) & (p < 2))
    ratio = jnp.where(size == 0, 1, size) / safe if p < 2 else size / safe
    return jnp.where(flat, 0, sign * ratio ** (p - 1))


@op(aten._cdist_forward)
def _cdist(x, y, p, compute_mode=None):
    mode = compute_mode or _AUTO
    large = max(x.shape[-2], y.shape[-2]) > _FEW_ROWS
    if p == 2 and (mode == _PRODUCT or (mode == _AUTO and large)):
        return parts_of(aten._euclidean_dist.default, x, y)
    difference = wide(x)[..., :, None, :] - wide(y)[..., None, :, :]
    return vector_norm(difference, p, -1) if x.shape[-1] else jnp.zeros(difference.shape[:-1])


@op(aten._cdist_backward, out=True)
def _cdist_backward(grad, x, y, p, distance, *, out):
    x, y, grad = wide(x), wide(y), wide(grad)
    difference = x[..., :, None, :] - y[..., None, :, :]
    gradient = jnp.sum(grad[..., None] * _slope(difference, wide(distance), p), axis=-2)
    return (
        gradient.reshape(out.shape) if gradient.size == math.prod(out.shape) else _sum_to(gradient, out.shape)
    )


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo a broadcast of batch dimensions."""
    extra = x.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        i + extra for i, n in enumerate(shape) if n == 1 and x.shape[i + extra] != 1
    )
    return jnp.sum(x, axis=axes, keepdims=True).reshape(shape)


# -- order, and running results ------------------------------------------------------------------------------


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
