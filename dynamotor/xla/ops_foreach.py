"""The optimizers' fused steps; `_foreach_*` needs no rules (`dispatch`: PyTorch's own kernel calls the op for one tensor).

>>> torch._fused_sgd_(params, grads, [], weight_decay=0, momentum=0, lr=0.1, dampening=0, nesterov=False, maximize=False,
...                   is_first_step=True)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import torch

from .lowering import op
from .numerics import wide
from .promotion import cast

aten = torch.ops.aten
# -- fused optimizer steps ----------------------------------------------------


def _steps(update: Callable[..., tuple[Any, ...]], lists: tuple[list[Any], ...], steps: list[Any], maximize: bool,
           grad_scale: Any, found_inf: Any) -> list[Any]:
    """`update(step, param, grad, *state)` for each parameter, in float32 or wider; results list by list, as aten returns them.

    `lists`: parameters, gradients, state; an empty list is state that is not used. With `grad_scale` the gradients come back
    unscaled; where `found_inf` is 1 nothing changes.
    """
    used = [entries for entries in lists if entries]
    columns: list[list[Any]] = [[] for _ in used]
    for index, old in enumerate(zip(*used)):
        param, grad, *state = (wide(value) for value in old)
        if grad_scale is not None:
            grad = grad / cast(grad_scale, grad.dtype)
        param, *state = update(wide(steps[index]) if steps else None, param, -grad if maximize else grad, *state)
        for column, was, now in zip(columns, old, (param, grad, *state)):
            column.append(now if found_inf is None else jnp.where(found_inf == 1, was.astype(now.dtype), now))
    return [value for column in columns for value in column]


def _adam(params, grads, averages, squares, largest, steps, *, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize,
          grad_scale=None, found_inf=None, decoupled=False):
    """Adam (Kingma and Ba, 2015), AMSGrad's maximum, and AdamW's decoupled decay (Loshchilov and Hutter, 2019)."""

    def update(step, param, grad, average, square, top=None):
        rate = cast(lr, param.dtype)
        if decoupled:
            param = param - rate * weight_decay * param
        else:
            grad = grad + weight_decay * param
        average = average + (1 - beta1) * (grad - average)
        square = beta2 * square + (1 - beta2) * grad * grad
        top = None if top is None else jnp.maximum(top, square)
        scale = jnp.sqrt(1 - beta2 ** step.astype(param.dtype))
        size = rate / (1 - beta1 ** step.astype(param.dtype))
        param = param - size * average / (jnp.sqrt(square if top is None else top) / scale + eps)
        return (param, average, square) if top is None else (param, average, square, top)

    lists = (params, grads, averages, squares, largest if amsgrad else [])
    return _steps(update, lists, steps, maximize, grad_scale, found_inf) + ([] if amsgrad else list(largest))


op(aten._fused_adam, lift=True)(_adam)
op(aten._fused_adamw, lift=True)(partial(_adam, decoupled=True))


@op(aten._fused_sgd, lift=True)
def _sgd(params, grads, momenta, *, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step,
         grad_scale=None, found_inf=None):
    """Gradient descent with momentum; the first step takes the gradient itself as the momentum."""

    def update(_, param, grad, speed=None):
        grad = grad + weight_decay * param
        if speed is None:
            return (param - cast(lr, param.dtype) * grad,)
        speed = grad if is_first_step else momentum * speed + (1 - dampening) * grad
        return param - cast(lr, param.dtype) * (grad + momentum * speed if nesterov else speed), speed

    return _steps(update, (params, grads, momenta), [], maximize, grad_scale, found_inf)
