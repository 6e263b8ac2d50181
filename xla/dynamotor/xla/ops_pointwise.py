"""Elementwise arithmetic, elementary functions, activations and their derivatives (with the same choice at
the kinks as aten's), comparisons and choices; special functions, complex numbers, Fourier transforms.

Bessel functions J, Y and K, Airy's function and orthogonal polynomials have no rule: XLA knows none, and they
run on the CPU.

A rule gets its tensors in the type of the result (`promotion.elementwise`), so that most are one row of a
table.

>>> torch.div(torch.tensor([7], device="xla"), 2, rounding_mode="floor")
tensor([3], device='xla:0')
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from math import factorial, pi
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.scipy import special

from dynamotor.extension_api import J0_COSINE, J0_NEAR, J0_SINE, J0_ZEROS_SQUARED, Ratio

from .dtypes import convert, wide
from .lowering import INFINITE, Lifted, Refusal, Spec, aten, op, require, rows
from .promotion import (
    cast,
    comparison,
    compute_dtype,
    elementwise,
    in_type,
    is_array,
    promoted,
    widened_float,
)


def is_integer(x: Any) -> bool:
    """True for integer and boolean arrays."""
    return jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_


def sgn(x: jax.Array) -> jax.Array:
    """x / |x|, 0 at 0; of a complex number its direction, of nan 0 for real and nan for complex."""
    if jnp.iscomplexobj(x):
        size = jnp.abs(x)
        return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size))
    return x if x.dtype == jnp.bool_ else convert(x > 0, x.dtype) - convert(x < 0, x.dtype)


def unless_integer(fn: Callable[..., Any]) -> Any:
    """Rounding leaves integers as they are."""
    return lambda x: x if is_integer(x) else fn(x)


def conjugate_symmetric(fn: Callable[..., Any], x):
    """f(conj z) = conj f(z) for a function with a cut on the real axis: the sign of a zero imaginary part
    names the side.
    """
    if not jnp.iscomplexobj(x):
        return fn(x)
    above = fn(lax.complex(x.real, jnp.abs(x.imag)))
    return jnp.where(jnp.signbit(x.imag), jnp.conj(above), above)


square_root = partial(conjugate_symmetric, jnp.sqrt)


@op(aten.abs, out=True)
def _abs(x, *, out: Spec):
    """The magnitude; a complex input gives a real result, so that the input must not be cast to its type."""
    return (
        x
        if x.dtype == jnp.bool_
        else jnp.abs(cast(x, compute_dtype(out.dtype)) if not jnp.iscomplexobj(x) else x)
    )


@elementwise(aten.round)
def _round(x, *, decimals=0):
    if is_integer(x):
        require(not decimals, "round of integers to decimals")
        return x
    if decimals == 0:
        return jnp.round(x)
    scale = float(10 ** abs(decimals))
    return jnp.round(x * scale) / scale if decimals > 0 else jnp.round(x / scale) * scale


# -- arithmetic of two tensors -------------------------------------------------------------------------------


def _scaled(y: jax.Array, alpha: Any) -> jax.Array:
    return y if not is_array(alpha) and alpha == 1 else y * cast(alpha, y.dtype)


@op(aten.div, out=True, lift=True, literals=INFINITE)
def _div(x, y, *, rounding_mode=None, out: Spec):
    """Integers divided with a rounding mode stay integers; XLA gives -1 for an integer divided by zero where
    aten raises.
    """
    dtype = compute_dtype(out.dtype)
    x, y = cast(x, dtype), cast(y, dtype)
    if rounding_mode is None:
        return x / y
    return floor_divide(x, y) if rounding_mode == "floor" else truncate_divide(x, y)


@elementwise(aten.floor_divide, lift=True, jumps=True)
def floor_divide(x, y):
    """The quotient rounded down. For floats it is made from the exact remainder, as Python's and aten's: 1 //
    0.1 is 9.
    """
    if is_integer(x):
        return x // _divisor(y)
    remainder = lax.rem(*jnp.broadcast_arrays(x, y))
    quotient = (x - remainder) / y
    quotient = jnp.where((remainder != 0) & ((y < 0) != (remainder < 0)), quotient - 1, quotient)
    whole = jnp.floor(quotient)
    whole = jnp.where(quotient - whole > 0.5, whole + 1, whole)
    result = jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(quotient), x / y), whole)
    return jnp.where(y == 0, x / y, result)


def truncate_divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """The quotient rounded towards zero. XLA divides by a constant through its reciprocal, which makes 20.5 /
    20.5 less than 1: the quotient without the exact remainder tells."""
    x, y = jnp.broadcast_arrays(x, _divisor(y))
    if is_integer(x):
        return lax.div(x, y)
    rounded, whole = jnp.trunc(x / y), jnp.round((x - lax.rem(x, y)) / y)
    return jnp.where(jnp.abs(whole) > jnp.abs(rounded), whole, rounded)


@elementwise(aten.remainder, lift=True, jumps=True)
def _remainder(x, y):
    """The remainder with the sign of the divisor, as Python's %."""
    rest = lax.rem(*jnp.broadcast_arrays(x, _divisor(y)))
    return jnp.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@elementwise(aten.fmod, lift=True, jumps=True)
def _fmod(x, y):
    """The remainder with the sign of the dividend, as C's."""
    return lax.rem(*jnp.broadcast_arrays(x, _divisor(y)))


def _divisor(y: Any) -> Any:
    """An integer divisor that is not zero: a constant zero is refused, as by aten; XLA's compiler may die of
    one in an array, whose quotients are arbitrary (`config.xla_debug` finds them)."""
    if not is_integer(y):
        return y
    if isinstance(y, np.generic) and y == 0:
        raise Refusal(RuntimeError("ZeroDivisionError"))
    return jnp.where(y == 0, jnp.ones_like(y), y)


_ROOTS = (0.5, -0.5)
_PRODUCTS = (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0)


@op(aten.pow, out=True, lift=(float,), literals=INFINITE.union(_ROOTS, _PRODUCTS))
def _pow(base, exponent, *, out: Spec):
    """Small constant exponents become products and roots, as in aten's kernels; others may change from call
    to call."""
    dtype = compute_dtype(out.dtype)
    if isinstance(exponent, Lifted):
        exponent = cast(exponent, dtype)
    number = not is_array(exponent) and (not isinstance(exponent, complex) or exponent == 0)
    if number and dtype != jnp.bool_ and not jnp.issubdtype(dtype, jnp.integer):
        return _power_of_constant(cast(base, dtype), float(exponent.real))
    base, exponent = cast(in_type(base, out), dtype), cast(in_type(exponent, out), dtype)
    if dtype == jnp.bool_:
        return base | ~exponent
    if jnp.iscomplexobj(base):
        return _complex_power(base, exponent)
    return _integer_power(base, exponent) if is_integer(base) else jnp.power(base, exponent)


def _power_of_constant(x: jax.Array, exponent: float) -> jax.Array:
    if exponent == 0.5:
        return square_root(x)
    if exponent == -0.5 and not jnp.iscomplexobj(x):
        return lax.rsqrt(x)
    if exponent in _PRODUCTS:
        return lax.integer_pow(x, int(exponent))
    power = _complex_power if jnp.iscomplexobj(x) else jnp.power
    return power(x, jnp.asarray(exponent, x.dtype))


def _complex_power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """aten's exp(exponent * log(base)), where XLA's differs: of zero, and of reals that become infinite."""
    power = jnp.power(base, exponent)
    is_real = (base.imag == 0) & (base.real > 0) & (exponent.imag == 0)
    power = lax.complex(power.real, jnp.where(is_real, 0, power.imag))
    of_zero = jnp.where(exponent.real > 0, 0, jnp.nan + jnp.nan * 1j).astype(power.dtype)
    return jnp.where(base == 0, of_zero, power)


def _integer_power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """Powers that wrap around, by squaring; a negative exponent gives 0, except for the bases 1 and -1."""
    base, exponent = jnp.broadcast_arrays(base, exponent)

    def square(state):
        left, square, result = state
        return left >> 1, square * square, jnp.where(left & 1 == 1, result * square, result)

    start = (jnp.where(exponent < 0, 0, exponent), base, jnp.ones_like(base))
    power = lax.while_loop(lambda state: jnp.any(state[0] > 0), square, start)[2]
    sign = jnp.where(exponent & 1 == 1, base, 1)
    unit = (base == 1) | (~base == 0)  # all bits set is -1 where there are signs
    return jnp.where(exponent < 0, jnp.where(unit, sign, 0), power)


@op(aten.nextafter)
def _nextafter(x, y):
    """Steps in the type of the tensors themselves; they are not widened."""
    dtype = jnp.promote_types(x.dtype, y.dtype)
    return lax.nextafter(*jnp.broadcast_arrays(x.astype(dtype), y.astype(dtype)))


@op(aten.frexp)
def _frexp(x):
    """Mantissa in [0.5, 1) and exponent; the exponent of 0, infinities and nan is 0."""
    mantissa, exponent = jnp.frexp(cast(x, compute_dtype(torch.float32)) if x.dtype.itemsize < 4 else x)
    return mantissa, jnp.where(jnp.isfinite(x), exponent, 0)


@elementwise(aten.logaddexp)
def logaddexp(x, y):
    """log(e^x + e^y) without overflow. Of complex numbers the one of larger real part leads, and the
    imaginary part of the result is not brought back to (-π, π]."""
    if not jnp.iscomplexobj(x):
        return jnp.logaddexp(x, y)
    ahead = x.real >= y.real
    high, low = jnp.where(ahead, x, y), jnp.where(ahead, y, x)
    same = jnp.isinf(high.real) & (high.real == low.real)
    apart = high + jnp.log1p(jnp.exp(jnp.where(same, 0, low - high)))
    together = jnp.where(low.real < 0, low, jnp.log(jnp.exp(low) + jnp.exp(high)))
    unknown = jnp.isnan(x) | jnp.isnan(y)
    return jnp.where(unknown, complex("nan+nanj"), jnp.where(same, together, apart))


rows(
    elementwise,
    {
        aten.acos: partial(conjugate_symmetric, jnp.arccos),
        aten.acosh: partial(conjugate_symmetric, jnp.arccosh),
        aten.asin: partial(conjugate_symmetric, jnp.arcsin),
        aten.asinh: jnp.arcsinh,
        aten.atan: jnp.arctan,
        aten.atanh: jnp.arctanh,
        aten.cos: jnp.cos,
        aten.cosh: jnp.cosh,
        aten.deg2rad: lambda x: x * (pi / 180),
        aten.exp: jnp.exp,
        aten.exp2: jnp.exp2,
        aten.expm1: jnp.expm1,
        aten.frac: lambda x: x - jnp.trunc(x),
        aten.log: jnp.log,
        aten.log10: jnp.log10,
        aten.log1p: jnp.log1p,
        aten.log2: jnp.log2,
        aten.rad2deg: lambda x: x * (180 / pi),
        aten.reciprocal: lambda x: 1 / x,
        aten.rsqrt: lambda x: 1 / square_root(x) if jnp.iscomplexobj(x) else lax.rsqrt(x),
        aten.sgn: sgn,
        aten.sign: sgn,
        aten.sin: jnp.sin,
        aten.sinh: jnp.sinh,
        aten.sqrt: square_root,
        aten.tan: jnp.tan,
        aten.tanh: jnp.tanh,
        aten.ceil: unless_integer(jnp.ceil),
        aten.floor: unless_integer(jnp.floor),
        aten.trunc: unless_integer(jnp.trunc),
        aten.neg: jnp.negative,
        aten._add_relu: lambda x, y, alpha=1: jnp.maximum(x + _scaled(y, alpha), 0),
        aten.atan2: lambda y, x: jnp.arctan2(y, x),
        aten.hypot: lambda x, y: jnp.hypot(x, y),
        aten.ldexp: lambda x, exponent: x * jnp.exp2(exponent),
        aten.gcd: lambda x, y: jnp.gcd(*jnp.broadcast_arrays(x, y)),
        aten.lcm: lambda x, y: jnp.lcm(*jnp.broadcast_arrays(x, y)),
    },
)


# -- arithmetic whose numbers may change from step to step: a learning rate may pass 0, 0.5, 1 and 2 ---------


rows(
    partial(elementwise, lift=True, literals=INFINITE, rounds=False),
    {
        aten.add: lambda x, y, alpha=1: x + _scaled(y, alpha),
        aten.sub: lambda x, y, alpha=1: x - _scaled(y, alpha),
        aten.mul: lambda x, y: x * y,
        aten.addcmul: lambda x, first, second, value=1: x + _scaled(first * second, value),
        aten.addcdiv: lambda x, first, second, value=1: x + _scaled(first, value) / second,
    },
)


@elementwise(aten.lerp, lift=True, literals=INFINITE, rounds=False)
def _lerp(start, end, weight):
    """start + weight·(end - start), from the nearer end: both ends are met exactly."""
    near_end = jnp.abs(weight) >= 0.5
    return jnp.where(near_end, end - (end - start) * (1 - weight), start + weight * (end - start))


# -- activations, and other functions of numbers that may change ---------------------------------------------


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + e^-x)."""
    return 1 / (1 + jnp.exp(-x)) if jnp.issubdtype(x.dtype, jnp.complexfloating) else lax.logistic(x)


rows(
    partial(elementwise, lift=True),
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
        aten.copysign: lambda x, y: jnp.copysign(x, y),
        aten.leaky_relu: lambda x, slope=0.01: jnp.where(x > 0, x, x * slope),
        aten.leaky_relu_backward: lambda grad, x, slope, is_result=False: jnp.where(
            x > 0, grad, grad * slope
        ),
        aten.silu: lambda x: (
            x / (1 + jnp.exp(-x)) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x * lax.logistic(x)
        ),
    },
)


# -- comparisons and choices ---------------------------------------------------------------------------------


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


op(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, lift=True)(
    lambda condition, x, y: jnp.where(truth(condition), *promoted(x, y))
)


@elementwise(aten.clamp, lift=True)
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
    },
)
rows(
    partial(elementwise, lift=True),
    {
        aten.clamp_min: lambda x, low: jnp.maximum(x, low),
        aten.clamp_max: lambda x, high: jnp.minimum(x, high),
    },
)


# -- special functions, complex numbers, Fourier transforms --------------------------------------------------


def digamma(x: jax.Array) -> jax.Array:
    """The derivative of lgamma; ∓inf at ±0, nan at negative integers."""
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x))


# -- gamma and zeta ------------------------------------------------------------------------------------------


def _incomplete_gamma(a: jax.Array, x: jax.Array, upper: bool) -> jax.Array:
    """The regularised incomplete gamma function: lower P(a, x), upper Q(a, x) = 1 - P(a, x)."""
    a, x = _same(a, x)
    undefined = (a < 0) | (x < 0) | ((a == 0) & ~(x > 0)) | (jnp.isinf(a) & jnp.isinf(x))
    low, high = (x == 0) | jnp.isinf(a), (a == 0) | jnp.isinf(x)
    value = (lax.igammac if upper else lax.igamma)(a, x)
    return jnp.select(
        [undefined, high, low, (a != a) | (x != x)], [jnp.nan, 1 - upper, upper, jnp.nan], value
    )


rows(
    elementwise,
    {
        aten.digamma: digamma,
        aten.erf: lax.erf,
        aten.erfc: lax.erfc,
        aten.erfinv: lax.erf_inv,
        aten.i0: special.i0,
        aten.lgamma: lax.lgamma,
        aten.special_erfcx: special.erfcx,
        aten.special_i0e: special.i0e,
        aten.special_i1: special.i1,
        aten.special_i1e: special.i1e,
        aten.special_log_ndtr: special.log_ndtr,
        aten.special_modified_bessel_i0: special.i0,
        aten.special_modified_bessel_i1: special.i1,
        aten.special_ndtri: special.ndtri,
        aten.igamma: partial(_incomplete_gamma, upper=False),
        aten.igammac: partial(_incomplete_gamma, upper=True),
    },
)


def _ratio(of: Ratio, by: jax.Array) -> jax.Array:
    above, below = (jnp.polyval(jnp.asarray(part, by.dtype), by) for part in of)
    return above / below


@elementwise(aten.special_bessel_j0)
def _bessel_j0(x: jax.Array) -> jax.Array:
    x = jnp.abs(x)
    square = x * x
    first, second = (square - zero for zero in J0_ZEROS_SQUARED)
    by, phase = 25 / square, x - pi / 4
    cosine, sine = jnp.cos(phase) * _ratio(J0_COSINE, by), jnp.sin(phase) * (5 / x) * _ratio(J0_SINE, by)
    far = (cosine - sine) * math.sqrt(2 / pi) / jnp.sqrt(x)
    return jnp.where(x <= 5, first * second * _ratio(J0_NEAR, square), far)


@elementwise(aten.special_spherical_bessel_j0)
def _spherical_bessel_j0(x: jax.Array) -> jax.Array:
    """sin(x) / x, near zero by its series in x²."""
    series = [(-1) ** n / math.factorial(2 * n + 1) for n in range(6, -1, -1)]
    far = jnp.where(jnp.isinf(x), 0, jnp.sin(x) / x)
    return jnp.where(jnp.abs(x) < 0.5, jnp.polyval(jnp.asarray(series, x.dtype), x * x), far)


def _same(*values: jax.Array) -> list[jax.Array]:
    return jnp.broadcast_arrays(*values)


@elementwise(aten.special_zeta)
def zeta(s, q):
    """Hurwitz's zeta function Σ (q + k)^-s. XLA's wants q > 0; for q < 0, f its fraction and whole s, the
    terms below zero belong to another one: ζ(s, q) = ζ(s, f) + (-1)^s (ζ(s, 1 - f) - ζ(s, 1 - q))."""
    s, q = _same(s, q)
    fraction = q - jnp.floor(q)
    below = (q < 0) & (fraction != 0)
    part = jnp.where(below, fraction, 0.5)
    sign = jnp.where(s % 2 == 0, 1, -1)
    mirrored = lax.zeta(s, part) + sign * (lax.zeta(s, 1 - part) - lax.zeta(s, jnp.where(below, 1 - q, 1)))
    direct = lax.zeta(s, jnp.where(q > 0, q, 1))
    direct = jnp.where(
        (direct != direct) & (s > 100) & (q <= 1), jnp.power(q, -s), direct
    )  # the first term is all of it
    pole = (s == 1) | ((q <= 0) & (q == jnp.floor(q)))
    undefined = (s < 1) | (below & (s != jnp.floor(s))) | (q != q)
    return jnp.select([undefined, pole, below], [jnp.nan, jnp.inf, mirrored], direct)


@op(aten.polygamma, out=True)
def _polygamma(n, x, *, out: Spec):
    """The n-th derivative of digamma: (-1)^(n+1) n! ζ(n + 1, x); the first one by reflection where x <
    1/2.
    """
    x = cast(x, compute_dtype(out.dtype))
    if n == 0:
        return digamma(x)
    if n == 1:
        low = x < 0.5
        mirrored = lax.zeta(jnp.full_like(x, 2), jnp.where(low, 1 - x, x))
        sine = jnp.sin(pi * x)
        return jnp.where(low, (pi * pi) / (sine * sine) - mirrored, jnp.where(x == jnp.inf, 0, mirrored))
    return (-1) ** (n + 1) * np.asarray(factorial(n), x.dtype) * zeta(jnp.full_like(x, n + 1), x)


# -- complex numbers -----------------------------------------------------------------------------------------


rows(
    op,
    {
        (aten._conj, aten._conj_physical, aten.conj_physical, aten._conj_copy): (
            lambda x: jnp.conj(x) if jnp.iscomplexobj(x) else x
        ),
        aten.complex: lambda real, imag: lax.complex(*jnp.broadcast_arrays(wide(real), wide(imag))),
        (aten._neg_view, aten._neg_view_copy): lambda x: -x,
    },
)


@op(aten.angle.default)
def _angle(x):
    """The angle of a complex number; of a real one 0 or π, nan for nan."""
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    x = widened_float(x)
    return jnp.where(x != x, x, jnp.where(x < 0, math.pi, 0).astype(x.dtype))


# -- Fourier transforms: `normalization` is 0 (none), 1 (by the root of n) or 2 (by n) -----------------------


_NONE, _BY_ROOT, _BY_SIZE = 0, 1, 2


def _normalised(x: jax.Array, sizes: Sequence[int], normalization: int) -> jax.Array:
    count = math.prod(sizes)
    if normalization == _NONE or not count:
        return x
    return x * jnp.asarray(1 / (math.sqrt(count) if normalization == _BY_ROOT else count), x.real.dtype)


def _complex(x: jax.Array, dims: Sequence[int], forward: bool) -> jax.Array:
    """Transforms without a factor, one dimension after the other."""
    for dim in dims:
        x = jnp.fft.fft(x, axis=dim) if forward else jnp.fft.ifft(x, axis=dim, norm="forward")
    return x


@op(aten._fft_c2c)
def _fft_c2c(x, dim, normalization, forward):
    return _normalised(_complex(x, dim, forward), [x.shape[d] for d in dim], normalization)


@op(aten._fft_r2c)
def _fft_r2c(x, dim, normalization, onesided):
    sizes = [x.shape[d] for d in dim]
    if onesided:
        return _normalised(_complex(jnp.fft.rfft(x, axis=dim[-1]), dim[:-1], True), sizes, normalization)
    return _normalised(_complex(x, dim, True), sizes, normalization)


@op(aten._fft_c2r)
def _fft_c2r(x, dim, normalization, last_dim_size):
    sizes = [*(x.shape[d] for d in dim[:-1]), last_dim_size]
    result = jnp.fft.irfft(_complex(x, dim[:-1], False), n=last_dim_size, axis=dim[-1], norm="forward")
    return _normalised(result, sizes, normalization)
