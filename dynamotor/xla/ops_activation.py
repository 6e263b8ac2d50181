"""Activation functions of neural networks and their derivatives.

Rules get their tensors in the type that the result is computed in (`promotion.elementwise`); a backward op is
written out, with the same choice at the kinks as aten's.

>>> torch.nn.functional.relu(torch.tensor([-1.0, 2.0], device="xla"))
tensor([0., 2.], device='xla:0')
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .lowering import aten, op, rows
from .numerics import wide
from .promotion import elementwise


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + e^-x)."""
    return 1 / (1 + jnp.exp(-x)) if jnp.issubdtype(x.dtype, jnp.complexfloating) else lax.logistic(x)


op(aten.leaky_relu_backward)(
    lambda grad, x, slope, is_result: jnp.where(wide(x) > 0, wide(grad), wide(grad) * slope)
)


rows(
    elementwise,
    {
        (aten.hardshrink_backward, aten.softshrink_backward): lambda grad, x, limit: jnp.where(
            (x >= -limit) & (x <= limit), 0, grad
        ),
        aten.elu: lambda x, alpha=1, scale=1, input_scale=1: jnp.where(
            x <= 0, jnp.expm1(x * input_scale) * (alpha * scale), x * scale
        ),
        aten.softplus: lambda x, beta=1, threshold=20: jnp.where(
            x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta
        ),
        aten.softplus_backward: lambda grad, x, beta, threshold: jnp.where(
            x * beta > threshold, grad, grad * lax.logistic(x * beta)
        ),
        aten.sigmoid: sigmoid,
        aten.sigmoid_backward: lambda grad, result: grad * jnp.conj((1 - result) * result),
        aten.tanh_backward: lambda grad, result: grad * jnp.conj(1 - result * result),
        aten.relu: lambda x: jnp.maximum(x, 0),
        aten.threshold_backward: lambda grad, x, threshold: jnp.where(x <= threshold, 0, grad),
        aten.hardtanh: lambda x, low=-1, high=1: jnp.minimum(jnp.maximum(x, low), high),
        aten.leaky_relu: lambda x, slope=0.01: jnp.where(x > 0, x, x * slope),
        aten.silu: lambda x: (
            x / (1 + jnp.exp(-x)) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x * lax.logistic(x)
        ),
    },
)
