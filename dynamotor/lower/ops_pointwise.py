"""Lowerings of elementwise ops.

A new op takes the first form that fits: a row of the table of `_unary`, `_jump`, `_binary` or `_backward`; a
row of the table at the end of the file, if its expression fits on a few lines; a function with `@lowering`.
docs/architecture.md goes through the steps for one op.

>>> lowerings.add(aten.exp.default, partial(_unary, partial(op, "exp"), True))    # True: floats only
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ..base.registry import register_all
from ..graph.nodes import operand, spec_of
from ..graph.op_facts import may_overflow
from ..graph.sizes import Dim, Size
from ..graph.spec import HALVES, aten
from .float8 import float8_of, float32_of, has_float8
from .ir import (
    BOOL,
    BYTES,
    COMPUTE_TYPE,
    F32,
    F64,
    I64,
    STORED,
    Expr,
    LoopNode,
    cast,
    compare,
    const,
    op,
    round_to,
    select,
)
from .lowering import Decline, LoopBuilder, Scalar, decline_if, lowering, lowerings
from .program import BufRef
from .value import LoopValue, is_dense


# -- helpers on expressions ----------------------------------------------------------------------------------
def like(value: float | Size, e: Expr) -> Expr:
    """A constant of e's type."""
    return const(value, e.dtype)


def add(a: Expr, b: Expr) -> Expr:
    return op("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return op("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    return a if b.op == "const" and b.args[0] == 1 else op("mul", a, b)


def div(a: Expr, b: Expr) -> Expr:
    return op("div", a, b)


def add_product(x: Expr, a: Expr, b: Expr) -> Expr:
    """x + a * b; floats are rounded once, as eager does in ops that are such a sum (`lerp`, `addcmul`,
    `alpha=`).
    """
    one = any(e.op == "const" and e.args[0] == 1 for e in (a, b))
    return op("fma", a, b, x) if x.dtype.is_floating_point and not one else add(x, mul(b, a))


def share(number: float, n: Dim, e: Expr) -> Expr:
    """number / n as a constant of e's type; n is a count."""
    return div(like(number, e), like(n, e)) if type(n) is Size else like(number / max(n, 1), e)


def relu(a: Expr) -> Expr:
    return select(compare("lt", a, like(0, a)), like(0, a), a)


def clamp(a: Expr, low: float, high: float) -> Expr:
    a = select(compare("lt", a, like(low, a)), like(low, a), a)
    return select(compare("gt", a, like(high, a)), like(high, a), a)


def sigmoid(a: Expr) -> Expr:
    return op("sigmoid", a)


def reciprocal(a: Expr) -> Expr:
    return div(like(1, a), a)


def promoted(*args: LoopValue | Scalar) -> torch.dtype:
    """The dtype that aten computes in for these operands."""

    def stand_in(x: LoopValue | Scalar) -> Any:
        return (
            torch.empty((1,) * min(len(x.shape), 1), dtype=x.dtype, device="meta")
            if isinstance(x, LoopValue)
            else x.hint
            if isinstance(x, Size)
            else x
        )

    first, *rest = [stand_in(a) for a in args]
    return first.dtype if not rest else torch.result_type(first, rest[0])


def need_wide_int(ctx: LoopBuilder) -> None:
    """Narrow integers wrap after each operation; most ops on them are left to aten."""
    decline_if(ctx.spec.dtype in (torch.int8, torch.uint8, torch.int16), "narrow integers")


# -- rows ----------------------------------------------------------------------------------------------------
def _unary(fn: Callable[[Expr], Expr], floats_only: bool, ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    """A one-operand op whose result type is its compute type."""
    dtype = ctx.spec.dtype
    decline_if(dtype is BOOL or floats_only and not dtype.is_floating_point, "integer operand")
    return ctx.pointwise(fn, x)


for _name in (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "tanh",
    "erf",
    "erfc",
    "sigmoid",
    "lgamma",
):
    lowerings.add(getattr(aten, _name).default, functools.partial(_unary, functools.partial(op, _name), True))
for _target, _fn in (
    (aten.relu.default, relu),
    (aten.neg.default, lambda e: op("neg", e)),
    (aten.abs.default, lambda e: op("abs", e)),
    (aten.reciprocal.default, reciprocal),
    (aten.square.default, lambda e: mul(e, e)),
    (aten.silu.default, lambda e: div(e, add(like(1, e), op("exp", op("neg", e))))),
    (aten.hardsigmoid.default, lambda e: div(clamp(add(e, like(3, e)), 0, 6), like(6, e))),
    (aten.hardswish.default, lambda e: div(mul(e, clamp(add(e, like(3, e)), 0, 6)), like(6, e))),
    (
        aten.mish.default,
        lambda e: (
            mul(e, op("tanh", op("log1p", op("exp", e))))
            if e.dtype is F64
            else mul(e, op("tanh", select(compare("gt", e, like(20, e)), e, op("log1p", op("exp", e)))))
        ),
    ),
    (aten.sgn.default, lambda e: _sign(e)),
    (aten.sign.default, lambda e: _sign(e)),
):
    lowerings.add(_target, functools.partial(_unary, _fn, False))


def jumping(ctx: LoopBuilder, fn: Callable[..., Expr], *inputs: LoopValue | Scalar) -> LoopValue:
    """A map with a jump: halves are rounded before it as memory rounds them, for a value beside the jump may
    round to the other side (`floor(7.999)` of a bfloat16 is 8).
    """
    dtype = ctx.spec.dtype
    if dtype not in HALVES:
        return ctx.pointwise(fn, *inputs)
    return ctx.pointwise(lambda *e: fn(*(round_to(a, dtype) for a in e)), *inputs)


def _jump(fn: Callable[[Expr], Expr], ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    decline_if(not ctx.spec.dtype.is_floating_point, "integer operand")
    return jumping(ctx, fn, x)


def _to_whole(name: str, ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    decline_if(ctx.spec.dtype is BOOL, "bools")
    floats = ctx.spec.dtype.is_floating_point
    return jumping(ctx, functools.partial(op, name), x) if floats else ctx.pointwise(lambda e: e, x)


for _name in ("floor", "ceil", "round", "trunc"):
    lowerings.add(getattr(aten, _name).default, functools.partial(_to_whole, _name))
lowerings.add(aten.frac.default, functools.partial(_jump, lambda e: sub(e, op("trunc", e))))


def _sign(e: Expr) -> Expr:
    zero = like(0, e)
    return select(compare("gt", e, zero), like(1, e), select(compare("lt", e, zero), like(-1, e), zero))


def _binary(
    fn: Callable[[Expr, Expr], Expr],
    floats_only: bool,
    jumps: bool,
    ctx: LoopBuilder,
    x: LoopValue | Scalar,
    y: LoopValue | Scalar,
) -> LoopValue:
    """A two-operand op whose result type is its compute type."""
    decline_if(floats_only and not ctx.spec.dtype.is_floating_point, "integer operands")
    decline_if(ctx.spec.dtype is BOOL, "bool arithmetic")
    x, y = as_eager_reads(ctx, x), y if fn is div else as_eager_reads(ctx, y)
    return jumping(ctx, fn, x, y) if jumps else ctx.pointwise(fn, x, y)


for _target, _of_two, _floats_only, _jumps in (
    (aten.mul.Scalar, mul, False, False),
    (aten.div.Tensor, div, False, False),
    (aten.div.Scalar, div, False, False),
    (aten.maximum.default, functools.partial(op, "max"), False, False),
    (aten.minimum.default, functools.partial(op, "min"), False, False),
    (aten.atan2.default, functools.partial(op, "atan2"), True, False),
    (aten.hypot.default, functools.partial(op, "hypot"), True, False),
    (aten.copysign.Tensor, functools.partial(op, "copysign"), True, False),
    (aten.fmod.Tensor, functools.partial(op, "fmod"), True, True),
    (aten.fmod.Scalar, functools.partial(op, "fmod"), True, True),
):
    lowerings.add(_target, functools.partial(_binary, _of_two, _floats_only, _jumps))


def as_eager_reads(ctx: LoopBuilder, x: Any, dtype: torch.dtype | None = None) -> Any:
    """aten on a CPU rounds a 0-d tensor of another type, integers too, to the halves beside it.
    The second operand of a product or a quotient is the exception: it is a number of float32. dtype: the
    operands' common type.
    """
    dtype = dtype or ctx.spec.dtype
    wide = isinstance(x, LoopValue) and not x.shape and x.dtype is not dtype
    if not wide or dtype not in HALVES or ctx.spec.device.type != "cpu":
        return x
    return ctx.pointwise(lambda a: round_to(a, dtype), x, shape=(), dtype=dtype)


def as_eager_adds(ctx: LoopBuilder, x: LoopValue | Scalar) -> Callable[[Expr], Expr]:
    """aten on a CPU rounds the addend of a half-precision tensor, if that has more digits: numbers, alpha
    and tensors of another type (not a number that it multiplies by). Sums vanish by it, or do not.
    """
    dtype = ctx.spec.dtype
    half = dtype in HALVES and ctx.spec.device.type == "cpu"
    if not half or isinstance(x, LoopValue) and x.dtype is dtype:
        return lambda e: e
    return lambda e: round_to(e, dtype)


def _combined(
    ctx: LoopBuilder, sign: int, x: LoopValue | Scalar, y: LoopValue | Scalar, alpha: Scalar
) -> LoopValue:
    first, second, factor = (as_eager_adds(ctx, n) for n in (x, y, alpha))

    def fn(a: Expr, b: Expr) -> Expr:
        a, b, k = first(a), second(b), factor(like(alpha, b))
        if k.op == "const" and k.args[0] == 1:
            return op("add" if sign > 0 else "sub", a, b)
        return add_product(a, b, k if sign > 0 else op("neg", k))

    return ctx.pointwise(fn, x, y)


@lowering(aten.mul.Tensor)
def _mul(ctx: LoopBuilder, x: LoopValue | Scalar, y: LoopValue | Scalar) -> LoopValue:
    if ctx.spec.dtype is BOOL:
        return ctx.pointwise(lambda a, b: op("and", a, b), x, y)
    return ctx.pointwise(mul, as_eager_reads(ctx, x), y)


@lowering(aten.add.Tensor, aten.add.Scalar)
def _add(ctx: LoopBuilder, x: LoopValue | Scalar, y: LoopValue | Scalar, alpha: Scalar = 1) -> LoopValue:
    if ctx.spec.dtype is BOOL:
        return ctx.pointwise(lambda a, b: op("or", a, b) if alpha else a, x, y)
    return _combined(ctx, 1, x, y, alpha)


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def _sub(ctx: LoopBuilder, x: LoopValue | Scalar, y: LoopValue | Scalar, alpha: Scalar = 1) -> LoopValue:
    return _combined(ctx, -1, x, y, alpha)


@lowering(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(
    ctx: LoopBuilder, x: LoopValue, y: LoopValue | Scalar, rounding_mode: str | None = None
) -> LoopValue:
    if rounding_mode is None:
        return ctx.pointwise(div, as_eager_reads(ctx, x), y)
    if not ctx.spec.dtype.is_floating_point:
        return _int_div(ctx, x, y, f"{rounding_mode}div")
    return _whole_quotient(ctx, rounding_mode, x, y)


lowerings.add(aten.floor_divide.default, functools.partial(_div_mode, rounding_mode="floor"))


def _whole_quotient(ctx: LoopBuilder, mode: str, x: LoopValue, y: LoopValue | Scalar) -> LoopValue:
    """Eager divides halves by a number, or a 0-d tensor of another type, as it is. Tensors are rounded, and
    on a CPU the quotient by more than one element is too before it is truncated.
    """
    dtype = ctx.spec.dtype
    rounded = isinstance(y, LoopValue) and (bool(y.shape) or y.dtype is dtype)
    several = isinstance(y, LoopValue) and any(n != 1 for n in y.shape)
    trips = several and ctx.spec.device.type == "cpu" and dtype in HALVES

    def fn(a: Expr, b: Expr) -> Expr:
        if mode == "floor":
            return op("floordiv", a, b)
        return op("trunc", round_to(div(a, b), dtype) if trips else div(a, b))

    return jumping(ctx, fn, x, y) if rounded else ctx.pointwise(lambda a, b: fn(round_to(a, dtype), b), x, y)


def _int_div(ctx: LoopBuilder, x: LoopValue, y: LoopValue | Scalar, name: str) -> LoopValue:
    need_wide_int(ctx)
    decline_if(
        isinstance(y, LoopValue) or y == 0 or not isinstance(y, int),
        "integer division that may divide by zero",
    )
    return ctx.pointwise(lambda a, b: op(name, a, b), x, y)


@lowering(aten.remainder.Scalar, aten.remainder.Tensor)
def _remainder(ctx: LoopBuilder, x: LoopValue, y: LoopValue | Scalar) -> LoopValue:
    if ctx.spec.dtype.is_floating_point:
        return jumping(ctx, lambda a, b: op("rem", a, b), x, y)
    return _int_div(ctx, x, y, "rem")


@lowering(aten.pow.Tensor_Scalar)
def _pow_scalar(ctx: LoopBuilder, x: LoopValue, exponent: Scalar) -> LoopValue:
    decline_if(
        not ctx.spec.dtype.is_floating_point and not (isinstance(exponent, int) and 0 < exponent <= 4),
        "integer power",
    )
    table: dict[Scalar, Callable[[Expr], Expr]] = {
        1: lambda a: a,
        2: lambda a: mul(a, a),
        3: lambda a: mul(mul(a, a), a),
        4: lambda a: mul(mul(a, a), mul(a, a)),
        0.5: lambda a: op("sqrt", a),
        -0.5: lambda a: op("rsqrt", a),
        -1: reciprocal,
        -2: lambda a: reciprocal(mul(a, a)),
    }
    # eager takes roots of float16 on a CPU as powers: -0 and -inf differ
    if exponent in table and (
        abs(exponent) != 0.5 or (ctx.spec.dtype, ctx.spec.device.type) != (torch.float16, "cpu")
    ):
        return ctx.pointwise(table[exponent], x)
    return _pow(ctx, x, exponent)


@lowering(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow(ctx: LoopBuilder, x: LoopValue | Scalar, y: LoopValue | Scalar) -> LoopValue:
    decline_if(not ctx.spec.dtype.is_floating_point, "integer power")
    dtype = ctx.spec.dtype  # a rounded exponent decides whether a negative base has a power, and its sign
    base = (lambda a: a) if isinstance(x, LoopValue) else (lambda a: round_to(a, dtype))
    return ctx.pointwise(lambda a, b: op("pow", base(a), round_to(b, dtype)), as_eager_reads(ctx, x), y)


# -- comparisons, logic, where -------------------------------------------------------------------------------
def _compare_rule(name: str, ctx: LoopBuilder, x: LoopValue, y: LoopValue | Scalar) -> LoopValue:
    dtype = promoted(x, y)
    compute = COMPUTE_TYPE[dtype]
    if compute is BOOL and name not in ("eq", "ne"):
        compute = I64
    if (
        dtype in HALVES
    ):  # one side may come from memory: a maximum, beside its own operand, which is computed again
        return ctx.pointwise(
            lambda a, b: compare(name, round_to(a, dtype), round_to(b, dtype)), x, y, compute=compute
        )
    return ctx.pointwise(lambda a, b: compare(name, a, b), x, y, compute=compute, common=dtype)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _packet = getattr(aten, _name)
    lowerings.add(_packet.Tensor, functools.partial(_compare_rule, _name))
    lowerings.add(_packet.Scalar, functools.partial(_compare_rule, _name))


def _converted(ctx: LoopBuilder, x: LoopValue, dtype: torch.dtype) -> LoopValue:
    """A tensor without dimensions in the type of the tensor beside it: 256 is false as an int8."""
    if x.shape or x.dtype in (dtype, BOOL):
        return x
    x = as_eager_reads(ctx, x, dtype)
    return ctx.pointwise(lambda a: a, x, shape=(), dtype=dtype)


def _logic_rule(name: str) -> Callable[..., LoopValue]:
    def rule(ctx: LoopBuilder, x: LoopValue, y: LoopValue) -> LoopValue:
        dtype = promoted(x, y)  # an operand of more digits may vanish in it
        x, y = _converted(ctx, x, dtype), _converted(ctx, y, dtype)
        return ctx.pointwise(lambda a, b: op(name, a, b), x, y, compute=BOOL)

    return rule


def _bitwise_rule(name: str) -> Callable[..., LoopValue]:
    return lambda ctx, x, y: ctx.pointwise(lambda a, b: op(name, a, b), x, y)


for _name in ("and", "or", "xor"):
    lowerings.add(getattr(aten, f"logical_{_name}").default, _logic_rule(_name))
    for _overload in ("Tensor", "Scalar"):
        lowerings.add(getattr(getattr(aten, f"bitwise_{_name}"), _overload), _bitwise_rule(_name))


def _known_shift(ctx: LoopBuilder, count: LoopValue | Scalar) -> int:
    """The bits that a shift moves: a number within the type, for which all machines agree."""
    bits = 8 * ctx.spec.dtype.itemsize
    decline_if(ctx.spec.dtype is BOOL or ctx.spec.dtype.is_floating_point, "a shift of no integers")
    if not isinstance(count, int) or not 0 <= count < bits - 1:
        raise Decline("a shift by no small number")
    return int(count)


@lowering(aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar)
def _right_shift(ctx: LoopBuilder, x: LoopValue, count: LoopValue | Scalar) -> LoopValue:
    return ctx.pointwise(lambda a, b: op("shr", a, b), x, _known_shift(ctx, count))


@lowering(aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor_Scalar)
def _left_shift(ctx: LoopBuilder, x: LoopValue, count: LoopValue | Scalar) -> LoopValue:
    return ctx.pointwise(mul, x, 1 << _known_shift(ctx, count))


def _within(count: Expr, dtype: torch.dtype) -> Expr:
    """Whether a shift moves no more bits than a type has, and not back."""
    below = compare("lt", count, like(8 * dtype.itemsize, count))
    return op("and", compare("ge", count, like(0, count)), below) if dtype.is_signed else below


@lowering(aten.__lshift__.Tensor, aten.bitwise_left_shift.Tensor)
def _left_shift_by(ctx: LoopBuilder, x: LoopValue, y: LoopValue) -> LoopValue:
    dtype = ctx.spec.dtype
    decline_if(dtype is BOOL or dtype.is_floating_point, "a shift of no integers")
    wider = COMPUTE_TYPE[dtype] is not dtype  # then a shift by all bits leaves none

    def shift(a: Expr, b: Expr) -> Expr:
        inside = _within(b, dtype)
        moved = op("shl", a, select(inside, b, like(8 * dtype.itemsize if wider else 0, b)))
        return moved if wider else select(inside, moved, like(0, a))

    return ctx.pointwise(shift, x, y)


@lowering(aten.__rshift__.Tensor, aten.bitwise_right_shift.Tensor)
def _right_shift_by(ctx: LoopBuilder, x: LoopValue, y: LoopValue) -> LoopValue:
    dtype = ctx.spec.dtype
    decline_if(dtype is BOOL or dtype.is_floating_point, "a shift of no integers")
    most = 8 * dtype.itemsize - dtype.is_signed  # leaves the sign alone; bytes are computed in 32 bits
    return ctx.pointwise(lambda a, b: op("shr", a, select(_within(b, dtype), b, like(most, b))), x, y)


@lowering(aten.isinf.default)
def _isinf(ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    if not x.dtype.is_floating_point:
        return ctx.pointwise(lambda a: const(False, BOOL), x)
    return ctx.pointwise(
        lambda a: compare("eq", op("abs", a), like(float("inf"), a)), x, compute=COMPUTE_TYPE[x.dtype]
    )


def held(ctx: LoopBuilder, x: LoopValue | Scalar) -> LoopValue:
    """A number, or a value of another type, as the result's type holds it when it is copied there."""
    dtype = ctx.spec.dtype if not isinstance(x, LoopValue) or x.dtype is not ctx.spec.dtype else None
    return ctx.pointwise(lambda a: a if dtype is None else round_to(a, dtype), x)


@lowering(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
def _where(ctx: LoopBuilder, condition: LoopValue, x: LoopValue | Scalar, y: LoopValue | Scalar) -> LoopValue:
    cond = ctx.pointwise(lambda a: a, condition, dtype=BOOL, compute=BOOL)
    yes, no = held(ctx, x), held(ctx, y)
    return ctx.generate(lambda index: select(cond.at(index), yes.at(index), no.at(index)))


@lowering(aten.masked_fill.Tensor)
def _masked_fill(ctx: LoopBuilder, x: LoopValue, mask: LoopValue, value: LoopValue) -> LoopValue:
    decline_if(may_overflow(value.dtype, x.dtype), "a value that may not fit the dtype, where aten raises")
    return _where(ctx, mask, value, x)


@lowering(aten.clamp.default)
def _clamp(ctx: LoopBuilder, x: LoopValue, min: Scalar | None = None, max: Scalar | None = None) -> LoopValue:
    def bound(number: Scalar, a: Expr, dtype: torch.dtype = ctx.spec.dtype) -> Expr:
        return round_to(like(number, a), dtype)

    def fn(a: Expr) -> Expr:
        if min is not None:
            a = select(compare("lt", a, bound(min, a)), bound(min, a), a)
        if max is not None:
            a = select(compare("gt", a, bound(max, a)), bound(max, a), a)
        return a

    decline_if(any(isinstance(b, float) and b != b for b in (min, max)), "NaN bound")
    return ctx.pointwise(fn, x)


@lowering(aten.clamp.Tensor)
def _clamp_tensor(
    ctx: LoopBuilder, x: LoopValue, min: LoopValue | None = None, max: LoopValue | None = None
) -> LoopValue:
    result = x
    if min is not None:
        result = ctx.pointwise(lambda a, b: op("max", a, b), result, min)
    return result if max is None else ctx.pointwise(lambda a, b: op("min", a, b), result, max)


@lowering(aten.heaviside.default)
def _heaviside(ctx: LoopBuilder, x: LoopValue, at_zero: LoopValue) -> LoopValue:
    decline_if(ctx.spec.dtype is BOOL, "bools")

    def fn(a: Expr, b: Expr) -> Expr:
        zero = like(0, a)
        return select(compare("eq", a, zero), b, select(compare("gt", a, zero), like(1, a), zero))

    return jumping(ctx, fn, x, at_zero)


@lowering(aten.nan_to_num.default)
def _nan_to_num(
    ctx: LoopBuilder,
    x: LoopValue,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> LoopValue:
    dtype = ctx.spec.dtype
    if not dtype.is_floating_point:
        return ctx.pointwise(lambda a: a, x)
    ends = torch.finfo(dtype)
    for_nan = 0.0 if nan is None else nan
    above, below = ends.max if posinf is None else posinf, ends.min if neginf is None else neginf

    def fn(a: Expr) -> Expr:
        def number(n: float) -> Expr:
            return round_to(like(n, a), dtype)

        e = select(compare("eq", a, like(math.inf, a)), number(above), a)
        e = select(compare("eq", a, like(-math.inf, a)), number(below), e)
        return select(compare("ne", a, a), number(for_nan), e)

    return jumping(ctx, fn, x)


@lowering(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(ctx: LoopBuilder, x: LoopValue, end: LoopValue, weight: LoopValue | Scalar) -> LoopValue:
    """x + weight * (end - x), from the nearer end."""
    dtype = ctx.spec.dtype
    if isinstance(weight, LoopValue):

        def fn(a: Expr, b: Expr, w: Expr) -> Expr:
            w = round_to(w, dtype)  # at 0.5 an infinite end gives NaN
            near_start = compare("lt", op("abs", w), like(0.5, w))
            step = select(near_start, w, sub(w, like(1, w)))
            return op("fma", sub(b, a), step, select(near_start, a, b))

        return ctx.pointwise(fn, x, end, weight)
    if abs(weight) < 0.5:
        return ctx.pointwise(lambda a, b: add_product(a, sub(b, a), like(weight, a)), x, end)
    return ctx.pointwise(lambda a, b: add_product(b, sub(b, a), sub(like(weight, a), like(1, a))), x, end)


# -- casts and copies ----------------------------------------------------------------------------------------
def convert(ctx: LoopBuilder, x: LoopValue, dtype: torch.dtype) -> LoopValue:
    """x in another dtype, rounded or wrapped as a copy of that dtype would be."""
    for each in (x.dtype, dtype):
        decline_if(each not in COMPUTE_TYPE and each not in BYTES, "a dtype that loop kernels do not have")
    by_instruction = dtype in BYTES and ctx.on_gpu and has_float8(ctx.spec.device)

    def body(index: Any) -> Expr:
        e = x.at(index)
        if x.dtype is dtype and dtype in BYTES:
            return e
        if x.dtype in HALVES and (not dtype.is_floating_point or dtype in BYTES):
            e = round_to(e, x.dtype)
        if dtype in BYTES:
            return float8_of(cast(e, F32), dtype, by_instruction)
        if x.dtype in BYTES:
            e = float32_of(e, x.dtype)
        e = cast(e, COMPUTE_TYPE[dtype])
        return e if x.dtype is dtype else round_to(e, dtype)

    return ctx.generate(body, x.shape, dtype)


def _as_complex(ctx: LoopBuilder, x: LoopValue) -> LoopValue:
    """Real numbers as complex ones: stored with zeros beside them, in memory that loops do not read."""
    spec = ctx.spec
    decline_if(ctx.on_gpu or ctx.is_symbolic, "complex numbers on a GPU, or of changing sizes")
    decline_if(x.dtype not in COMPUTE_TYPE or not is_dense(spec), "complex numbers, or holes between them")
    buffer = ctx.new_buffer(spec)
    part = STORED[spec.dtype]
    name = str(ctx.node)
    ctx.add(
        LoopNode(buffer.name, spec.shape, lambda i: cast(x.at(i), part), spec.stride, spec.dtype, origin=name)
    )
    return LoopValue(spec.shape, spec.dtype, ref=BufRef.whole(buffer))


@lowering(aten._to_copy.default)
def _to_copy(
    ctx: LoopBuilder,
    x: LoopValue,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    memory_format: Any = None,
    **other: Any,
) -> LoopValue:
    source = spec_of(operand(ctx.node, 0))
    # A single number may be read from anywhere.
    decline_if(source.shape and source.device != ctx.spec.device, "another device")
    if ctx.spec.dtype.is_complex:
        return _as_complex(ctx, x)
    return convert(ctx, x, ctx.spec.dtype)


# -- activations with options, and backwards -----------------------------------------------------------------
SQRT_HALF, SQRT_2_OVER_PI, INV_SQRT_2PI = 0.7071067811865476, 0.7978845608028654, 0.3989422804014327


def _normal_cdf(a: Expr, half: bool) -> Expr:
    """The standard normal distribution; a result in half precision does not need all digits of it."""
    if half:
        return op("normal_cdf", a)
    return mul(like(0.5, a), add(op("erf", mul(a, like(SQRT_HALF, a))), like(1, a)))


@lowering(aten.gelu.default)
def _gelu(ctx: LoopBuilder, x: LoopValue, *, approximate: str = "none") -> LoopValue:
    half = (
        ctx.spec.dtype in HALVES
    )  # read here: expressions are made later, when the context is at another op

    def exact(a: Expr) -> Expr:
        return mul(a, _normal_cdf(a, half))

    def tanh(a: Expr) -> Expr:
        inner = mul(like(SQRT_2_OVER_PI, a), add(a, mul(like(0.044715, a), mul(mul(a, a), a))))
        return mul(mul(like(0.5, a), a), add(like(1, a), op("tanh", inner)))

    return ctx.pointwise(exact if approximate == "none" else tanh, x)


@lowering(aten.gelu_backward.default)
def _gelu_backward(ctx: LoopBuilder, g: LoopValue, x: LoopValue, *, approximate: str = "none") -> LoopValue:
    half = ctx.spec.dtype in HALVES

    def exact(g: Expr, a: Expr) -> Expr:
        cdf = _normal_cdf(a, half)
        pdf = mul(op("exp", mul(mul(a, a), like(-0.5, a))), like(INV_SQRT_2PI, a))
        return mul(g, add(cdf, mul(a, pdf)))

    def tanh(g: Expr, a: Expr) -> Expr:
        square = mul(a, a)
        inner = mul(like(SQRT_2_OVER_PI, a), add(a, mul(like(0.044715, a), mul(square, a))))
        t = op("tanh", inner)
        left = mul(like(0.5, a), add(like(1, a), t))
        slope = mul(like(SQRT_2_OVER_PI, a), add(like(1, a), mul(like(3 * 0.044715, a), square)))
        right = mul(mul(like(0.5, a), a), mul(sub(like(1, a), mul(t, t)), slope))
        return mul(g, add(left, right))

    return ctx.pointwise(exact if approximate == "none" else tanh, g, x)


def _backward(target: Any, fn: Callable[[Expr, Expr], Expr]) -> None:
    lowerings.add(target, lambda ctx, g, x: ctx.pointwise(fn, g, x))


_backward(aten.tanh_backward.default, lambda g, y: mul(g, sub(like(1, y), mul(y, y))))
_backward(aten.sigmoid_backward.default, lambda g, y: mul(g, mul(sub(like(1, y), y), y)))


def _silu_backward(g: Expr, x: Expr) -> Expr:
    s = sigmoid(x)
    return mul(mul(g, s), add(like(1, x), mul(x, sub(like(1, x), s))))


_backward(aten.silu_backward.default, _silu_backward)


def _hardswish_backward(g: Expr, x: Expr) -> Expr:
    middle = mul(g, add(div(x, like(3, x)), like(0.5, x)))
    return select(compare("le", x, like(-3, x)), like(0, g), select(compare("ge", x, like(3, x)), g, middle))


_backward(aten.hardswish_backward.default, _hardswish_backward)
SIXTH = 0.1666666716337204  # the library's constant is a float32's 1/6 in float64 too
_backward(
    aten.hardsigmoid_backward.default,
    lambda g, x: select(
        op("and", compare("gt", x, like(-3, x)), compare("lt", x, like(3, x))),
        mul(g, like(SIXTH, g)),
        like(0, g),
    ),
)


@lowering(aten.softplus_backward.default)
def _softplus_backward(
    ctx: LoopBuilder, g: LoopValue, x: LoopValue, beta: Scalar, threshold: Scalar
) -> LoopValue:
    def fn(g: Expr, x: Expr) -> Expr:
        scaled = mul(x, like(beta, x))
        return select(compare("gt", scaled, like(threshold, x)), g, mul(g, sigmoid(scaled)))

    return ctx.pointwise(fn, g, x)


def _exp_of_minus_abs(x: Expr) -> Expr:
    return op("exp", op("neg", op("abs", x)))


@lowering(aten.log_sigmoid_forward.default)
def _log_sigmoid(ctx: LoopBuilder, x: LoopValue) -> tuple[LoopValue, LoopValue]:
    """The result and exp(-|x|), which the gradient takes on a CPU; on a GPU eager gives an empty tensor for
    it."""
    decline_if(ctx.spec[0].device.type != "cpu", "a result of another size on this device")

    def fn(e: Expr) -> Expr:
        negative = op("min", e, like(0, e))
        return sub(negative, op("log1p", _exp_of_minus_abs(e)))

    out, decayed = (ctx.pointwise(f, x, shape=x.shape, dtype=x.dtype) for f in (fn, _exp_of_minus_abs))
    return out, decayed


@lowering(aten.log_sigmoid_backward.default)
def _log_sigmoid_backward(ctx: LoopBuilder, g: LoopValue, x: LoopValue, decayed: LoopValue) -> LoopValue:
    decline_if(ctx.spec.device.type != "cpu", "an operand of another size on this device")

    def fn(g: Expr, x: Expr, z: Expr) -> Expr:
        other = div(z, add(like(1, z), z))  # sigmoid(-|x|)
        return mul(g, select(compare("lt", x, like(0, x)), sub(like(1, x), other), other))

    return ctx.pointwise(fn, g, x, decayed)


def _hardshrink(ctx: LoopBuilder, x: LoopValue, limit: Scalar) -> LoopValue:
    """Zero between -limit and limit, which aten rounds to the dtype."""

    def fn(a: Expr) -> Expr:
        low, high = (round_to(like(number, a), x.dtype) for number in (-limit, limit))
        return select(op("and", compare("ge", a, low), compare("le", a, high)), like(0, a), a)

    return jumping(ctx, fn, x)


def _softshrink(a: Expr, limit: Scalar) -> Expr:
    below = select(compare("lt", a, like(-limit, a)), add(a, like(limit, a)), mul(a, like(0, a)))
    return select(compare("gt", a, like(limit, a)), sub(a, like(limit, a)), below)


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
            (aten.rsub.Scalar, aten.rsub.Tensor),
            lambda ctx, x, y, alpha=1: _sub(ctx, y, x, alpha),
        ),
        ((aten.logical_not.default,), lambda ctx, x: ctx.pointwise(lambda a: op("not", a), x, compute=BOOL)),
        (
            (aten.bitwise_not.default,),
            lambda ctx, x: ctx.pointwise(lambda a: op("not" if a.dtype is BOOL else "bitnot", a), x),
        ),
        (
            (aten.isnan.default,),
            lambda ctx, x: ctx.pointwise(lambda a: compare("ne", a, a), x, compute=COMPUTE_TYPE[x.dtype]),
        ),
        ((aten.masked_fill.Scalar,), lambda ctx, x, mask, value: _where(ctx, mask, value, x)),
        ((aten.clamp_min.default,), lambda ctx, x, min: _clamp(ctx, x, min)),
        ((aten.clamp_max.default,), lambda ctx, x, max: _clamp(ctx, x, None, max)),
        ((aten.clamp_min.Tensor,), lambda ctx, x, min: _clamp_tensor(ctx, x, min)),
        ((aten.clamp_max.Tensor,), lambda ctx, x, max: _clamp_tensor(ctx, x, None, max)),
        ((aten.hardtanh.default,), lambda ctx, x, min_val=-1, max_val=1: _clamp(ctx, x, min_val, max_val)),
        (
            (aten.hardtanh_backward.default,),
            lambda ctx, g, x, min_val, max_val: ctx.pointwise(
                lambda g, a: select(
                    op("or", compare("le", a, like(min_val, a)), compare("ge", a, like(max_val, a))),
                    like(0, g),
                    g,
                ),
                g,
                x,
            ),
        ),
        (
            (aten.addcmul.default,),
            lambda ctx, x, a, b, value=1: ctx.pointwise(
                lambda x, a, b: add_product(x, mul(a, like(value, x)), b),
                *(as_eager_reads(ctx, n) for n in (x, a, b)),
            ),
        ),
        (
            (aten.addcdiv.default,),
            lambda ctx, x, a, b, value=1: ctx.pointwise(
                lambda x, a, b: add(x, div(mul(like(value, x), a), b)),
                *(as_eager_reads(ctx, n) for n in (x, a, b)),
            ),
        ),
        ((torch.ops.prims.convert_element_type.default,), lambda ctx, x, dtype: convert(ctx, x, dtype)),
        (
            (aten.clone.default, aten.lift_fresh_copy.default),
            lambda ctx, x, *, memory_format=None: convert(ctx, x, x.dtype),
        ),
        ((aten.copy.default,), lambda ctx, x, source, non_blocking=False: held(ctx, source)),
        (
            (aten.threshold_backward.default,),
            lambda ctx, g, x, threshold: ctx.pointwise(
                lambda g, a: select(compare("le", a, like(threshold, a)), like(0, g), g), g, x
            ),
        ),
        (
            (aten.leaky_relu.default,),
            lambda ctx, x, negative_slope=0.01: ctx.pointwise(
                lambda a: select(compare("gt", a, like(0, a)), a, mul(a, like(negative_slope, a))), x
            ),
        ),
        (
            (aten.leaky_relu_backward.default,),
            lambda ctx, g, x, slope, is_result: ctx.pointwise(
                lambda g, a: select(compare("gt", a, like(0, a)), g, mul(g, like(slope, g))), g, x
            ),
        ),
        (
            (aten.elu.default,),
            lambda ctx, x, alpha=1, scale=1, input_scale=1: ctx.pointwise(
                lambda a: select(
                    compare("gt", a, like(0, a)),
                    mul(a, like(scale, a)),
                    mul(op("expm1", mul(a, like(input_scale, a))), like(alpha * scale, a)),
                ),
                x,
            ),
        ),
        (
            (aten.softplus.default,),
            lambda ctx, x, beta=1, threshold=20: ctx.pointwise(
                lambda a: select(
                    compare("gt", mul(a, like(beta, a)), like(threshold, a)),
                    a,
                    div(op("log1p", op("exp", mul(a, like(beta, a)))), like(beta, a)),
                ),
                x,
            ),
        ),
        (
            (aten.native_dropout_backward.default,),
            lambda ctx, g, mask, scale: ctx.pointwise(lambda g, m: mul(mul(g, m), like(scale, g)), g, mask),
        ),
        (
            (aten.celu.default,),
            lambda ctx, x, alpha=1.0: lowerings[aten.elu.default](ctx, x, alpha, 1.0, 1.0 / alpha),
        ),
        ((aten.mish_backward.default,), lambda ctx, g, x: ctx.pointwise(_mish_backward, g, x)),
        (
            (aten.threshold.default,),
            lambda ctx, x, threshold, value: jumping(
                ctx, lambda a: select(compare("le", a, like(threshold, a)), like(value, a), a), x
            ),
        ),
        (
            (aten.hardshrink.default,),
            lambda ctx, x, limit=0.5: _hardshrink(ctx, x, limit),
        ),
        (
            (aten.softshrink.default,),
            lambda ctx, x, limit=0.5: jumping(ctx, lambda a: _softshrink(a, limit), x),
        ),
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
