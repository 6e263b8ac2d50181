"""Lowerings of elementwise functions that fewer programs call, and of gated halves (`glu`).

>>> lowering(aten.fmax.default)(partial(_of_floats, _fmax))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from ..base.registry import register_all
from ..graph.bessel import J0_COSINE, J0_NEAR, J0_SINE, J0_ZEROS_SQUARED, Ratio
from ..graph.spec import HALVES, aten
from . import value as views
from .ir import BOOL, COMPUTE_TYPE, Expr, compare, const, op, select
from .lowering import LoopBuilder, Scalar, decline_if, lowering
from .ops_pointwise import add, clamp, div, jumping, like, mul, sigmoid, sub
from .ops_view import concatenated
from .value import LoopValue

Operand = LoopValue | Scalar


def _of_floats(fn: Callable[..., Expr], ctx: LoopBuilder, *operands: Operand) -> LoopValue:
    """A function with jumps of operands that are floats."""
    decline_if(not ctx.spec.dtype.is_floating_point, "integer operands")
    return jumping(ctx, fn, *operands)


def _of_numbers(fn: Callable[..., Expr], ctx: LoopBuilder, *operands: Operand) -> LoopValue:
    """A function with jumps of operands that are not bools."""
    decline_if(ctx.spec.dtype is BOOL, "bools")
    return jumping(ctx, fn, *operands)


def _decline_vectors(ctx: LoopBuilder, also_halves: bool = False) -> None:
    """Leave to aten the functions that its vectors on a CPU compute otherwise, for NaN and the ends of an
    interval, than its loops over the last elements do.
    """
    decline_if(not ctx.on_gpu and (also_halves or ctx.spec.dtype not in HALVES), "eager differs by place")


def _is_nan(a: Expr) -> Expr:
    return compare("ne", a, a)


def _fmax(a: Expr, b: Expr) -> Expr:
    return select(_is_nan(b), a, select(compare("ge", a, b), a, b))


def _fmin(a: Expr, b: Expr) -> Expr:
    return select(_is_nan(b), a, select(compare("le", a, b), a, b))


def _angle(a: Expr) -> Expr:
    return select(_is_nan(a), a, select(compare("lt", a, like(0, a)), like(math.pi, a), like(0, a)))


def _logaddexp(base: str, scale: float, a: Expr, b: Expr) -> Expr:
    """log(base^a + base^b) / log(base); equal infinities are themselves."""
    far = op("log1p", op(base, op("neg", op("abs", sub(a, b)))))
    found = add(op("max", a, b), far if scale == 1 else mul(far, like(scale, a)))
    infinite = compare("eq", op("abs", a), like(math.inf, a))
    return select(op("and", infinite, compare("eq", a, b)), a, found)


def _xlog1py(a: Expr, b: Expr) -> Expr:
    product = select(compare("eq", a, like(0, a)), like(0, a), mul(a, op("log1p", b)))
    return select(_is_nan(b), b, product)


def _entr(a: Expr) -> Expr:
    rest = select(compare("eq", a, like(0, a)), like(0, a), like(-math.inf, a))
    return select(_is_nan(a), a, select(compare("gt", a, like(0, a)), mul(op("neg", a), op("log", a)), rest))


def _polynomial(coefficients: tuple[float, ...], x: Expr) -> Expr:
    """By Horner's rule, the highest power first."""
    first, *rest = (like(c, x) for c in coefficients)
    return functools.reduce(lambda sum_, c: op("fma", sum_, x, c), rest, first)


def _bessel_j0(a: Expr) -> Expr:
    def ratio(of: Ratio, by: Expr) -> Expr:
        return div(_polynomial(of[0], by), _polynomial(of[1], by))

    a = op("abs", a)
    square = mul(a, a)
    first, second = (sub(square, like(zero, a)) for zero in J0_ZEROS_SQUARED)
    near = mul(mul(first, second), ratio(J0_NEAR, square))
    by, phase = div(like(25, a), square), sub(a, like(math.pi / 4, a))
    cosine = mul(ratio(J0_COSINE, by), op("cos", phase))
    sine = mul(mul(div(like(5, a), a), ratio(J0_SINE, by)), op("sin", phase))
    far = div(mul(sub(cosine, sine), like(math.sqrt(2 / math.pi), a)), op("sqrt", a))
    return select(compare("le", a, like(5, a)), near, far)


def _special_bessel_j0(ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    decline_if(ctx.spec.dtype in HALVES, "eager refuses halves")
    return ctx.pointwise(_bessel_j0, x)


def _spherical_bessel_j0(ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    """sin(x) / x, near zero by its series in x^2."""
    decline_if(ctx.spec.dtype in HALVES, "eager refuses halves")
    series = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(6, -1, -1))

    def fn(a: Expr) -> Expr:
        far = select(compare("eq", op("abs", a), like(math.inf, a)), like(0, a), div(op("sin", a), a))
        near = compare("lt", op("abs", a), like(0.5, a))
        return select(near, _polynomial(series, mul(a, a)), far)

    return ctx.pointwise(fn, x)


def _logit(ctx: LoopBuilder, x: LoopValue, eps: float | None = None) -> LoopValue:
    def fn(a: Expr) -> Expr:
        a = a if eps is None else clamp(a, eps, 1 - eps)
        return op("log", div(a, sub(like(1, a), a)))

    return _of_floats(fn, ctx, x)


def _logit_backward(ctx: LoopBuilder, g: LoopValue, x: LoopValue, eps: float | None = None) -> LoopValue:
    _decline_vectors(ctx)
    low, high, outside = (0.0, 1.0, math.nan) if eps is None else (eps, 1 - eps, 0.0)

    def fn(g: Expr, a: Expr) -> Expr:
        slope = div(g, mul(a, sub(like(1, a), a)))
        at_end = op("or", compare("eq", a, like(0, a)), compare("eq", a, like(1, a)))
        beyond = op("or", compare("lt", a, like(low, a)), compare("gt", a, like(high, a)))
        return select(beyond, like(outside, g), select(at_end, mul(g, like(math.inf, g)), slope))

    return _of_floats(fn, ctx, g, x)


def _elu_backward(
    ctx: LoopBuilder,
    g: LoopValue,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    x: LoopValue,
) -> LoopValue:
    _decline_vectors(ctx)

    def fn(g: Expr, a: Expr) -> Expr:
        below = mul(g, like(input_scale, g))
        if is_result:
            below = mul(below, add(a, like(alpha * scale, a)))
        else:
            below = mul(mul(below, like(alpha * scale, g)), op("exp", mul(a, like(input_scale, a))))
        return select(compare("le", a, like(0, a)), below, mul(g, like(scale, g)))

    return _of_floats(fn, ctx, g, x)


def _shrink_backward(ctx: LoopBuilder, g: LoopValue, x: LoopValue, limit: float = 0.5) -> LoopValue:
    _decline_vectors(ctx, also_halves=True)

    def fn(g: Expr, a: Expr) -> Expr:
        within = op("and", compare("ge", a, like(-limit, a)), compare("le", a, like(limit, a)))
        return select(within, like(0, g), g)

    return _of_floats(fn, ctx, g, x)


def _signbit(ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    decline_if(x.dtype is BOOL, "bools")

    def fn(a: Expr) -> Expr:
        signed = op("copysign", like(1, a), a) if a.dtype.is_floating_point else a
        return compare("lt", signed, like(0, a))

    return ctx.pointwise(fn, x, compute=COMPUTE_TYPE[x.dtype])


def _is(number: float, ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    decline_if(ctx.spec.dtype is not BOOL, "another type of result")
    if not x.dtype.is_floating_point:
        return ctx.pointwise(lambda a: const(False, BOOL), x)
    return ctx.pointwise(lambda a: compare("eq", a, like(number, a)), x, compute=COMPUTE_TYPE[x.dtype])


def _scaled(factor: float, ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    return ctx.pointwise(lambda a: mul(a, like(factor, a)), x)


register_all(
    lowering,
    (
        ((aten.fmax.default,), functools.partial(_of_numbers, _fmax)),
        ((aten.fmin.default,), functools.partial(_of_numbers, _fmin)),
        (
            (aten.logaddexp.default,),
            functools.partial(_of_floats, functools.partial(_logaddexp, "exp", 1)),
        ),
        (
            (aten.logaddexp2.default,),
            functools.partial(_of_floats, functools.partial(_logaddexp, "exp2", 1 / math.log(2))),
        ),
        ((aten.special_xlog1py.default,), functools.partial(_of_floats, _xlog1py)),
        ((aten.special_entr.default,), functools.partial(_of_floats, _entr)),
        ((aten.special_bessel_j0.default,), _special_bessel_j0),
        ((aten.special_spherical_bessel_j0.default,), _spherical_bessel_j0),
        ((aten.angle.default,), functools.partial(_of_floats, _angle)),
        ((aten.logit.default,), _logit),
        ((aten.logit_backward.default,), _logit_backward),
        ((aten.elu_backward.default,), _elu_backward),
        ((aten.hardshrink_backward.default, aten.softshrink_backward.default), _shrink_backward),
        ((aten.signbit.default,), _signbit),
        ((aten.isposinf.default,), functools.partial(_is, math.inf)),
        ((aten.isneginf.default,), functools.partial(_is, -math.inf)),
        ((aten.deg2rad.default,), functools.partial(_scaled, math.pi / 180)),
        ((aten.rad2deg.default,), functools.partial(_scaled, 180 / math.pi)),
    ),
)


# Gated halves -----------------------------------------------------------------------------------------------
def _halves(ctx: LoopBuilder, x: LoopValue, dim: int) -> tuple[int, LoopValue, LoopValue]:
    dim %= len(x.shape)
    half, whole = x.shape[dim] // 2, ctx.whole(x)
    return dim, views.slice_dim(whole, dim, 0, 1, half), views.slice_dim(whole, dim, half, 1, half)


@lowering(aten.glu.default)
def _glu(ctx: LoopBuilder, x: LoopValue, dim: int = -1) -> LoopValue:
    _, a, b = _halves(ctx, x, dim)
    return ctx.pointwise(lambda a, b: mul(a, sigmoid(b)), a, b)


@lowering(aten.glu_backward.default)
def _glu_backward(ctx: LoopBuilder, g: LoopValue, x: LoopValue, dim: int) -> LoopValue:
    decline_if(ctx.spec.dtype in HALVES and not ctx.on_gpu, "eager rounds the gate")
    dim, a, b = _halves(ctx, x, dim)

    def of_gate(g: Expr, a: Expr, b: Expr) -> Expr:
        gate = sigmoid(b)
        return mul(mul(mul(sub(like(1, gate), gate), gate), a), g)

    first = ctx.pointwise(lambda g, b: mul(sigmoid(b), g), g, b, shape=g.shape)
    second = ctx.pointwise(of_gate, g, a, b, shape=g.shape)
    return concatenated(ctx, [first, second], dim)
