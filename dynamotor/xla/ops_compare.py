"""Comparison, logic, bits, and choosing between values.

>>> torch.where(torch.tensor([1, -1], device="xla") > 0, 1.0, 2.0)
tensor([1., 2.], device='xla:0')
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .lowering import aten, op, rows
from .ops_pointwise import is_integer
from .promotion import comparison, elementwise, promoted

rows(
    comparison,
    {
        aten.eq: lambda x, y: x == y,
        aten.ne: lambda x, y: x != y,
        aten.lt: lambda x, y: x < y,
        aten.le: lambda x, y: x <= y,
        aten.gt: lambda x, y: x > y,
        aten.ge: lambda x, y: x >= y,
        aten.isnan: lambda x: x != x,
        aten.isinf: lambda x: jnp.zeros(x.shape, bool) if is_integer(x) else jnp.isinf(x),
        aten.isposinf: lambda x: jnp.zeros(x.shape, bool) if is_integer(x) else x == jnp.inf,
        aten.isneginf: lambda x: jnp.zeros(x.shape, bool) if is_integer(x) else x == -jnp.inf,
        aten.signbit: lambda x: x < 0 if is_integer(x) else jnp.signbit(x),
    },
)


def truth(x: jax.Array) -> jax.Array:
    """The truth values of a tensor: not equal to zero (nan is true)."""
    return x if x.dtype == jnp.bool_ else x != 0


rows(
    lambda target: lambda fn: op(target)(lambda *values: fn(*map(truth, values))),
    {
        aten.logical_and: lambda x, y: x & y,
        aten.logical_or: lambda x, y: x | y,
        aten.logical_xor: lambda x, y: x ^ y,
        aten.logical_not: lambda x: ~x,
    },
)


def _bits(x: jax.Array) -> int:
    return x.dtype.itemsize * 8


@elementwise(aten.bitwise_left_shift, aten.__lshift__)
def _left_shift(x, y):
    """Shifts of a negative or too large number of bits give 0."""
    if not is_integer(x):
        return x * jnp.exp2(y)
    x, y = jnp.broadcast_arrays(x, y)
    outside = (y < 0) | (y >= _bits(x))
    return jnp.where(outside, 0, lax.shift_left(x, jnp.where(outside, 0, y)))


@elementwise(aten.bitwise_right_shift, aten.__rshift__)
def _right_shift(x, y):
    """Shifts of a negative or too large number of bits leave the sign only."""
    if not is_integer(x):
        return x * jnp.exp2(-y)
    x, y = jnp.broadcast_arrays(x, y)
    signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
    outside = (y < 0) | (y >= _bits(x))
    shift = lax.shift_right_arithmetic if signed else lax.shift_right_logical
    shifted = shift(x, jnp.where(outside, _bits(x) - 1, y))
    return shifted if signed else jnp.where(outside, 0, shifted)


@op(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(condition, x, y):
    return jnp.where(truth(condition), *promoted(x, y))


@elementwise(aten.clamp)
def _clamp(x: jax.Array, min: jax.Array | None = None, max: jax.Array | None = None) -> jax.Array:
    """The lower bound first, so that the upper one wins where they cross; nan passes through from any of the
    three.
    """
    if min is not None:
        x = jnp.maximum(x, min)
    return x if max is None else jnp.minimum(x, max)


rows(
    elementwise,
    {
        aten.bitwise_and: lambda x, y: x & y,
        aten.bitwise_or: lambda x, y: x | y,
        aten.bitwise_xor: lambda x, y: x ^ y,
        aten.bitwise_not: lambda x: ~x,
        aten.maximum: jnp.maximum,
        aten.minimum: jnp.minimum,
        aten.fmax: lambda x, y: jnp.maximum(x, y) if is_integer(x) else jnp.fmax(x, y),
        aten.fmin: lambda x, y: jnp.minimum(x, y) if is_integer(x) else jnp.fmin(x, y),
        aten.clamp_min: lambda x, low: jnp.maximum(x, low),
        aten.clamp_max: lambda x, high: jnp.minimum(x, high),
    },
)
