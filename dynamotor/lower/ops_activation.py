"""Lowerings of activations that only few models use, and of their gradients: one row each.

>>> (aten.threshold.default, lambda ctx, x, threshold, value: ...)
"""

from __future__ import annotations

import math

from ..base.registry import register_all
from ..graph.spec import aten
from .ir import Expr, compare, op, select
from .lowering import LoopBuilder, Scalar, decline_if, lowering, lowerings
from .ops_pointwise import add, div, jumping, like, mul, sigmoid, sub
from .value import LoopValue


def _within(a: Expr, limit: Scalar) -> Expr:
    """Whether -limit <= a <= limit."""
    return op("and", compare("ge", a, like(-limit, a)), compare("le", a, like(limit, a)))


def _softshrink(a: Expr, limit: Scalar) -> Expr:
    below = select(compare("lt", a, like(-limit, a)), add(a, like(limit, a)), mul(a, like(0, a)))
    return select(compare("gt", a, like(limit, a)), sub(a, like(limit, a)), below)


def _shrink_backward(ctx: LoopBuilder, g: LoopValue, x: LoopValue, limit: Scalar) -> LoopValue:
    """At NaN the vectors of a CPU give 0, other kernels the gradient."""
    in_vectors = ctx.spec.device.type == "cpu"

    def fn(g: Expr, a: Expr) -> Expr:
        if not in_vectors:
            return select(_within(a, limit), like(0, g), g)
        beyond = op("or", compare("gt", a, like(limit, a)), compare("lt", a, like(-limit, a)))
        return select(beyond, g, like(0, g))

    return ctx.pointwise(fn, g, x)


def _elu_backward(
    ctx: LoopBuilder,
    g: LoopValue,
    alpha: Scalar,
    scale: Scalar,
    input_scale: Scalar,
    is_result: bool,
    x: LoopValue,
) -> LoopValue:
    """x: the result where `is_result`, else the operand. At NaN the vectors of a CPU give NaN, other kernels
    the gradient.
    """
    in_vectors = ctx.spec.device.type == "cpu"

    def fn(g: Expr, a: Expr) -> Expr:
        slope = like(alpha * scale, a)
        decayed = add(a, slope) if is_result else mul(slope, op("exp", mul(a, like(input_scale, a))))
        negative, positive = mul(mul(g, like(input_scale, a)), decayed), mul(g, like(scale, g))
        if in_vectors:
            return select(compare("gt", a, like(0, a)), positive, negative)
        return select(compare("le", a, like(0, a)), negative, positive)

    return ctx.pointwise(fn, g, x)


def _mish_backward(g: Expr, x: Expr) -> Expr:
    t = op("tanh", op("log1p", op("exp", x)))
    return mul(g, add(t, mul(mul(x, sigmoid(x)), sub(like(1, x), mul(t, t)))))


def _prelu_backward(
    ctx: LoopBuilder, g: LoopValue, x: LoopValue, weight: LoopValue
) -> tuple[LoopValue, LoopValue]:
    """The gradients of the operand and, before they are summed, of the weights."""

    def of_operand(g: Expr, x: Expr, w: Expr) -> Expr:
        return select(compare("gt", x, like(0, x)), g, mul(w, g))

    def of_weight(g: Expr, x: Expr, _: Expr) -> Expr:
        return select(compare("gt", x, like(0, x)), like(0, x), mul(x, g))

    first, second = (
        ctx.pointwise(fn, g, x, weight, shape=x.shape, dtype=x.dtype) for fn in (of_operand, of_weight)
    )
    return first, second


def _xlogy(ctx: LoopBuilder, x: LoopValue | Scalar, y: LoopValue | Scalar) -> LoopValue:
    decline_if(not ctx.spec.dtype.is_floating_point, "integer operands")

    def fn(a: Expr, b: Expr) -> Expr:
        product = select(compare("eq", a, like(0, a)), like(0, a), mul(a, op("log", b)))
        return select(compare("ne", b, b), b, product)

    return jumping(ctx, fn, x, y)


def _sinc(ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    decline_if(not ctx.spec.dtype.is_floating_point, "integer operand")

    def fn(a: Expr) -> Expr:
        angle = mul(a, like(math.pi, a))
        return select(compare("eq", a, like(0, a)), like(1, a), div(op("sin", angle), angle))

    return jumping(ctx, fn, x)


register_all(
    lowering,
    (
        (
            (aten.celu.default,),
            lambda ctx, x, alpha=1.0: lowerings[aten.elu.default](ctx, x, alpha, 1.0, 1.0 / alpha),
        ),
        ((aten.elu_backward.default,), _elu_backward),
        ((aten.mish_backward.default,), lambda ctx, g, x: ctx.pointwise(_mish_backward, g, x)),
        (
            (aten.threshold.default,),
            lambda ctx, x, threshold, value: jumping(
                ctx, lambda a: select(compare("le", a, like(threshold, a)), like(value, a), a), x
            ),
        ),
        (
            (aten.hardshrink.default,),
            lambda ctx, x, limit=0.5: jumping(ctx, lambda a: select(_within(a, limit), like(0, a), a), x),
        ),
        (
            (aten.softshrink.default,),
            lambda ctx, x, limit=0.5: jumping(ctx, lambda a: _softshrink(a, limit), x),
        ),
        ((aten.hardshrink_backward.default, aten.softshrink_backward.default), _shrink_backward),
        (
            (aten._prelu_kernel.default,),
            lambda ctx, x, weight: ctx.pointwise(
                lambda a, w: select(compare("gt", a, like(0, a)), a, mul(w, a)), x, weight
            ),
        ),
        ((aten._prelu_kernel_backward.default,), _prelu_backward),
        ((aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self), _xlogy),
        ((aten.sinc.default,), _sinc),
    ),
)
