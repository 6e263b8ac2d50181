"""softmax and log_softmax, their gradients, and the masked and safe forms; sums in float32 for low precision.

>>> torch.softmax(x.half(), -1)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from .lowering import op
from .numerics import wide

aten = torch.ops.aten


def _shifted(x: jax.Array, dim: int) -> jax.Array:
    """x minus its maximum along `dim` (of at least one dimension). A row of -inf gives nan, as aten's."""
    return x - jax.lax.stop_gradient(
        jnp.max(x, axis=dim, keepdims=True, initial=None if x.shape[dim] else -jnp.inf)
    )


def softmax(x: jax.Array, dim: int) -> jax.Array:
    """softmax of a floating array along `dim`."""
    if x.ndim == 0:
        return jnp.where(jnp.isfinite(x), jnp.ones_like(x), jnp.nan)
    powers = jnp.exp(_shifted(x, dim))
    return powers / jnp.sum(powers, axis=dim, keepdims=True)


@op(aten._softmax)
def _softmax(x, dim, half_to_float):
    return softmax(wide(x), dim)


@op(aten._log_softmax)
def _log_softmax(x, dim, half_to_float):
    x = wide(x)
    if x.ndim == 0:
        return jnp.where(jnp.isfinite(x), jnp.zeros_like(x), jnp.nan)
    shifted = _shifted(x, dim)
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=dim, keepdims=True))


@op(aten._softmax_backward_data)
def _softmax_backward(grad, output, dim, input_dtype):
    grad, output = wide(grad), wide(output)
    weighted = grad * output
    return weighted - output * _total(weighted, dim)


@op(aten._log_softmax_backward_data)
def _log_softmax_backward(grad, output, dim, input_dtype):
    grad, output = wide(grad), wide(output)
    return grad - jnp.exp(output) * _total(grad, dim)


def _total(x: jax.Array, dim: int) -> jax.Array:
    return jnp.sum(x, axis=dim, keepdims=True) if x.ndim else x


@op(aten._safe_softmax)
def _safe_softmax(x, dim, dtype=None):
    x = wide(x)
    masked = x == -jnp.inf
    return jnp.where(jnp.all(masked, axis=dim, keepdims=True) if x.ndim else masked, 0, softmax(x, dim))


_SOURCE_MASK, _PADDING_MASK = 0, 1


@op(aten._masked_softmax)
def _masked_softmax(x, mask, dim=None, mask_type=None):
    """True in the mask hides; the mask is (L, L), (B, L) or of x's own shape. Rows that are hidden whole give
    nan.
    """
    x = wide(x)
    if mask_type == _SOURCE_MASK:
        mask = mask.reshape((1,) * (x.ndim - 2) + mask.shape[-2:])
    elif mask_type == _PADDING_MASK:
        mask = mask.reshape(mask.shape[0], *(1,) * (x.ndim - 2), mask.shape[-1])
    return softmax(jnp.where(mask, -jnp.inf, x), -1 if dim is None else dim)


@op(aten._masked_softmax_backward)
def _masked_softmax_backward(grad, output, mask, dim=None):
    grad, output = wide(grad), wide(output)
    dim = -1 if dim is None else dim
    weighted = jnp.where(mask, 0, grad * output)
    return jnp.where(mask, 0, weighted - output * jnp.sum(weighted, axis=dim, keepdims=True))
