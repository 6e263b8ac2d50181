"""Ops on lists of tensors: `_foreach_*` from the rules of one tensor, and the optimizers' fused steps.

>>> torch._foreach_add([torch.ones(2, device="xla"), torch.zeros(1, device="xla")], 1)
[tensor([2., 2.], device='xla:0'), tensor([1.], device='xla:0')]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from . import ops_activation, ops_compare, ops_matmul, ops_pointwise, ops_special
from .lowering import Lowering, Spec, lowerings, op
from .numerics import wide
from .ops_reduce import _linalg_vector_norm, _max, _powsum
from .promotion import cast

aten = torch.ops.aten
# The modules whose rules for one tensor are taken from the registry: they must be there first.
FIRST = (ops_activation, ops_compare, ops_matmul, ops_pointwise, ops_special)

NAMES = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round rsqrt"
    " sigmoid sign sin sinh sqrt tan tanh trunc add sub mul div pow maximum minimum clamp_max clamp_min lerp addcmul addcdiv mm"
)


def each(rule: Lowering) -> Callable[..., list[Any]]:
    """The rule for lists: the i-th result from the i-th entries, and from what is no list as it is."""

    def lowered(*args: Any, out: tuple[Spec, ...], **kwargs: Any) -> list[Any]:
        results = []
        for index, spec in enumerate(out):
            entries = [arg[index] if isinstance(arg, (list, tuple)) else arg for arg in args]
            results.append(rule.fn(*entries, **kwargs, **({"out": spec} if rule.wants_out else {})))
        return results

    return lowered


def _register() -> None:
    """One row for each `_foreach_` op; this PyTorch may lack some."""
    single: dict[str, Lowering | None] = {name: lowerings.get(getattr(aten, name)) for name in NAMES.split()}
    others = {"max": _max, "zero": jnp.zeros_like, "clone": lambda x: x, "copy": lambda x, source, non_blocking=False: source}
    others["norm"] = lambda x, ord=2, dtype=None: _linalg_vector_norm(x, ord, dtype=dtype)
    others["powsum"] = lambda x, ord=2, dtype=None: _powsum(x, ord, dtype=dtype)
    single |= {name: Lowering(rule) for name, rule in others.items()}
    for name, rule in single.items():
        target = getattr(aten, f"_foreach_{name}", None)
        if rule is not None and target is not None:
            op(target, out=True, lift=rule.lifted)(each(rule))


_register()


def _with_scalars_of_a_tensor(rule: Lowering) -> Callable[..., list[Any]]:
    """`_foreach_addcmul.Tensor`: the i-th number of a 1-d tensor is the scalar of the i-th result."""

    def lowered(tensors: Any, first: Any, second: Any, scalars: jax.Array, *, out: tuple[Spec, ...]) -> list[Any]:
        return each(rule)(tensors, first, second, list(scalars), out=out)

    return lowered


for _name in ("addcmul", "addcdiv"):
    op(getattr(aten, f"_foreach_{_name}").Tensor, out=True)(_with_scalars_of_a_tensor(lowerings[getattr(aten, _name)]))

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
