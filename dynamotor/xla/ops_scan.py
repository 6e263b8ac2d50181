"""Running sums, products and extrema along one dimension.

>>> torch.tensor([3, 1, 4], device="xla").cummax(0).indices
tensor([0, 0, 2], device='xla:0')
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from .lowering import Spec, op
from .ops_pointwise import is_complex, logaddexp
from .ops_reduce import in_dtype
from .promotion import widened_float

aten = torch.ops.aten


@op(aten.cumsum, out=True)
def _cumsum(x, dim, *, dtype=None, out: Spec):
    x = in_dtype(x, out)
    return jnp.cumsum(x, dim) if x.ndim else x


@op(aten.cumprod, out=True)
def _cumprod(x, dim, *, dtype=None, out: Spec):
    x = in_dtype(x, out)
    return jnp.cumprod(x, dim) if x.ndim else x


@op(aten._logcumsumexp, aten.logcumsumexp)
def _logcumsumexp(x, dim):
    x = widened_float(x)
    if x.ndim == 0:
        return x
    return (
        lax.associative_scan(logaddexp, x, axis=dim % x.ndim)
        if is_complex(x)
        else lax.cumlogsumexp(x, dim % x.ndim)
    )


op(aten.cummax)(lambda x, dim: _running(lambda new, old: new >= old, x, dim))
op(aten.cummin)(lambda x, dim: _running(lambda new, old: new <= old, x, dim))


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
