"""Lowerings of losses between two tensors of one shape, and of their gradients.

Each loss is a map; `reduction` (an aten enum) says whether it is averaged, summed or left as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from ..graph.sizes import Dim
from ..graph.spec import aten, numel
from . import value as views
from .ir import Expr, compare, op, select
from .lowering import LoopBuilder, Scalar, lowering
from .ops_pointwise import add, div, like, mul, share, sub
from .ops_reduce import MEAN, narrow, total, wide
from .value import LoopValue


def _reduced(ctx: LoopBuilder, fn: Callable[..., Expr], reduction: int, *inputs: LoopValue) -> LoopValue:
    """The map of the inputs, averaged or summed in the type of sums."""
    compute = wide(ctx.spec.dtype)
    shape = views.broadcast_shape(inputs[0].shape, inputs[1].shape)
    loss = ctx.pointwise(fn, *inputs, shape=shape, dtype=compute)
    if reduction == 0:
        return narrow(ctx, loss, ctx.spec.dtype)
    n = numel(shape) if reduction == MEAN else 1
    return ctx.pointwise(lambda s: div(s, like(n, s)), total(ctx, loss, range(len(shape)), False, compute))


def _count(x: LoopValue, reduction: int) -> Dim:
    return numel(x.shape) if reduction == MEAN else 1


@lowering(aten.mse_loss.default)
def _mse_loss(ctx: LoopBuilder, x: LoopValue, y: LoopValue, reduction: int = MEAN) -> LoopValue:
    return _reduced(ctx, lambda a, b: mul(sub(a, b), sub(a, b)), reduction, x, y)


@lowering(aten.mse_loss_backward.default)
def _mse_loss_backward(
    ctx: LoopBuilder, g: LoopValue, x: LoopValue, y: LoopValue, reduction: int
) -> LoopValue:
    n = _count(x, reduction)
    return ctx.pointwise(lambda g, a, b: mul(mul(share(2.0, n, a), sub(a, b)), g), g, x, y)


@lowering(aten.smooth_l1_loss.default)
def _smooth_l1_loss(
    ctx: LoopBuilder, x: LoopValue, y: LoopValue, reduction: int = MEAN, beta: Scalar = 1.0
) -> LoopValue:
    def fn(a: Expr, b: Expr) -> Expr:
        d = op("abs", sub(a, b))
        far = sub(d, like(0.5 * beta, d))
        return select(compare("lt", d, like(beta, d)), div(mul(mul(like(0.5, d), d), d), like(beta, d)), far)

    return _reduced(ctx, fn, reduction, x, y)


@lowering(aten.huber_loss.default)
def _huber_loss(
    ctx: LoopBuilder, x: LoopValue, y: LoopValue, reduction: int = MEAN, delta: Scalar = 1.0
) -> LoopValue:
    def fn(a: Expr, b: Expr) -> Expr:
        d = op("abs", sub(a, b))
        far = mul(like(delta, d), sub(d, like(0.5 * delta, d)))
        return select(compare("le", d, like(delta, d)), mul(mul(like(0.5, d), d), d), far)

    return _reduced(ctx, fn, reduction, x, y)


def _clipped(
    ctx: LoopBuilder, inputs: tuple[LoopValue, ...], reduction: int, limit: Scalar, inner: float, outer: float
) -> LoopValue:
    """The gradient of a loss that is a square within the limit and linear beyond. inner: the factor of the
    difference within, outer: of its sign beyond.
    """
    n = _count(inputs[1], reduction)

    def fn(g: Expr, a: Expr, b: Expr) -> Expr:
        d, end = sub(a, b), mul(share(outer, n, g), g)
        above = select(compare("ge", d, like(limit, d)), end, mul(mul(share(inner, n, g), d), g))
        return select(compare("le", d, like(-limit, d)), op("neg", end), above)

    return ctx.pointwise(fn, *inputs)


@lowering(aten.smooth_l1_loss_backward.default)
def _smooth_l1_loss_backward(
    ctx: LoopBuilder, g: LoopValue, x: LoopValue, y: LoopValue, reduction: int, beta: Scalar
) -> LoopValue:
    return _clipped(ctx, (g, x, y), reduction, beta, 1.0 / beta if beta else 0.0, 1.0)


@lowering(aten.huber_loss_backward.default)
def _huber_loss_backward(
    ctx: LoopBuilder, g: LoopValue, x: LoopValue, y: LoopValue, reduction: int, delta: Scalar
) -> LoopValue:
    return _clipped(ctx, (g, x, y), reduction, delta, 1.0, delta)


@lowering(aten.binary_cross_entropy_with_logits.default)
def _binary_cross_entropy_with_logits(
    ctx: LoopBuilder,
    x: LoopValue,
    y: LoopValue,
    weight: LoopValue | None = None,
    pos_weight: LoopValue | None = None,
    reduction: int = MEAN,
) -> LoopValue:
    factors = [one for one in (weight, pos_weight) if one is not None]

    def fn(a: Expr, b: Expr, *rest: Expr) -> Expr:
        found = iter(rest)
        scale = next(found) if weight is not None else None
        log_sigmoid = sub(op("min", a, like(0, a)), op("log1p", op("exp", op("neg", op("abs", a)))))
        if pos_weight is not None:
            log_sigmoid = mul(log_sigmoid, add(mul(sub(next(found), like(1, a)), b), like(1, a)))
        loss = sub(mul(sub(like(1, a), b), a), log_sigmoid)
        return loss if scale is None else mul(loss, scale)

    return _reduced(ctx, fn, reduction, x, y, *factors)
