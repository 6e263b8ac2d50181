"""Distances between rows: cdist for every p, with gradients.

>>> torch.cdist(x, y, p=1.0)
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from .lowering import aten, op
from .numerics import wide
from .ops_decomposed import parts_of

_AUTO, _PRODUCT, _DIFFERENCE = (
    0,
    1,
    2,
)  # compute_mode of cdist: from 26 rows on, by a product, or by differences
_FEW_ROWS = 25


def _norm(difference: jax.Array, p: float) -> jax.Array:
    """The p-norm over the last dimension."""
    size = jnp.abs(difference)
    if p == 0:
        return jnp.sum(size != 0, axis=-1).astype(size.dtype)
    if p == 1:
        return jnp.sum(size, axis=-1)
    if p == 2:
        return jnp.sqrt(jnp.sum(jnp.square(size), axis=-1))
    if math.isinf(p):
        return jnp.max(size, axis=-1, initial=0)
    return jnp.sum(size**p, axis=-1) ** (1 / p)


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
    return _norm(wide(x)[..., :, None, :] - wide(y)[..., None, :, :], p)


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
