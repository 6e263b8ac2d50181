"""Special functions: error functions, gamma and zeta functions, Bessel functions of the first kinds, orthogonal polynomials.

Bessel functions J, Y and K and Airy's function have no rule: XLA knows no such function, and they run on the CPU.

>>> torch.special.legendre_polynomial_p(torch.tensor([0.5], device="xla"), 2)
tensor([-0.1250], device='xla:0')
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import factorial, pi
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.scipy import special

from .lowering import Spec, op
from .promotion import cast, compute_dtype, elementwise

aten = torch.ops.aten


def digamma(x: jax.Array) -> jax.Array:
    """The derivative of lgamma; ∓inf at ±0, nan at negative integers."""
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x))


FUNCTIONS = {
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
}
for _target, _fn in FUNCTIONS.items():
    elementwise(_target)(_fn)


# -- gamma and zeta --------------------------------------------------------------------------------------------------------------


def _incomplete_gamma(a: jax.Array, x: jax.Array, upper: bool) -> jax.Array:
    """The regularised incomplete gamma function: lower P(a, x), upper Q(a, x) = 1 - P(a, x)."""
    a, x = _same(a, x)
    undefined = (a < 0) | (x < 0) | ((a == 0) & ~(x > 0)) | (jnp.isinf(a) & jnp.isinf(x))
    low, high = (x == 0) | jnp.isinf(a), (a == 0) | jnp.isinf(x)
    value = (lax.igammac if upper else lax.igamma)(a, x)
    return jnp.select([undefined, high, low, (a != a) | (x != x)], [jnp.nan, 1 - upper, upper, jnp.nan], value)


elementwise(aten.igamma)(partial(_incomplete_gamma, upper=False))
elementwise(aten.igammac)(partial(_incomplete_gamma, upper=True))


def _same(*values: jax.Array) -> list[jax.Array]:
    return jnp.broadcast_arrays(*values)


@elementwise(aten.special_zeta)
def zeta(s, q):
    """Hurwitz's zeta function Σ (q + k)^-s. XLA's wants q > 0; for q < 0, f its fraction and whole s, the terms below zero
    belong to another one: ζ(s, q) = ζ(s, f) + (-1)^s (ζ(s, 1 - f) - ζ(s, 1 - q))."""
    s, q = _same(s, q)
    fraction = q - jnp.floor(q)
    below = (q < 0) & (fraction != 0)
    part = jnp.where(below, fraction, 0.5)
    sign = jnp.where(s % 2 == 0, 1, -1)
    mirrored = lax.zeta(s, part) + sign * (lax.zeta(s, 1 - part) - lax.zeta(s, jnp.where(below, 1 - q, 1)))
    direct = lax.zeta(s, jnp.where(q > 0, q, 1))
    direct = jnp.where((direct != direct) & (s > 100) & (q <= 1), jnp.power(q, -s), direct)  # the first term is all of it
    pole = (s == 1) | ((q <= 0) & (q == jnp.floor(q)))
    undefined = (s < 1) | (below & (s != jnp.floor(s))) | (q != q)
    return jnp.select([undefined, pole, below], [jnp.nan, jnp.inf, mirrored], direct)


@op(aten.polygamma, out=True)
def _polygamma(n, x, *, out: Spec):
    """The n-th derivative of digamma: (-1)^(n+1) n! ζ(n + 1, x); the first one by reflection where x < 1/2."""
    x = cast(x, compute_dtype(out.dtype))
    if n == 0:
        return digamma(x)
    if n == 1:
        low = x < 0.5
        mirrored = lax.zeta(jnp.full_like(x, 2), jnp.where(low, 1 - x, x))
        sine = jnp.sin(pi * x)
        return jnp.where(low, (pi * pi) / (sine * sine) - mirrored, jnp.where(x == jnp.inf, 0, mirrored))
    return (-1) ** (n + 1) * np.asarray(factorial(n), x.dtype) * zeta(jnp.full_like(x, n + 1), x)


# -- orthogonal polynomials ------------------------------------------------------------------------------------------------------


class Polynomials(NamedTuple):
    """A family by its recurrence. `first(x)`: degree 1; `step(k, x, older, old)`: degree k from the two degrees before it."""

    first: Callable[[jax.Array], jax.Array]
    step: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def _chebyshev_step(k, x, older, old):
    return 2 * x * old - older


CHEBYSHEV_T = Polynomials(lambda x: x, _chebyshev_step)
CHEBYSHEV_U = Polynomials(lambda x: 2 * x, _chebyshev_step)
CHEBYSHEV_V = Polynomials(lambda x: 2 * x - 1, _chebyshev_step)
CHEBYSHEV_W = Polynomials(lambda x: 2 * x + 1, _chebyshev_step)
HERMITE_H = Polynomials(lambda x: 2 * x, lambda k, x, older, old: 2 * x * old - 2 * (k - 1) * older)
HERMITE_HE = Polynomials(lambda x: x, lambda k, x, older, old: x * old - (k - 1) * older)
LAGUERRE_L = Polynomials(lambda x: 1 - x, lambda k, x, older, old: ((2 * k - 1 - x) * old - (k - 1) * older) / k)
LEGENDRE_P = Polynomials(lambda x: x, lambda k, x, older, old: ((2 * k - 1) * x * old - (k - 1) * older) / k)


HIGHEST_DEGREE = 1_000_000


def evaluate(family: Polynomials, x: jax.Array, degree: jax.Array) -> jax.Array:
    """The polynomial of each degree (rounded towards zero) at each x; 0 for negative degrees, nan above HIGHEST_DEGREE."""
    x, degree = _same(x, jnp.trunc(degree))
    first = family.first(x)

    def step(state):
        k, older, old, result = state
        new = family.step(k, x, older, old)
        return k + 1, old, new, jnp.where(degree == k, new, result)

    result = jnp.where(degree < 0, 0, jnp.where(degree == 0, 1, first))
    start = (jnp.asarray(2, x.dtype), jnp.ones_like(x), first, result)
    result = lax.while_loop(lambda state: jnp.any(state[0] <= degree) & (state[0] <= HIGHEST_DEGREE), step, start)[3]
    return jnp.where(degree > HIGHEST_DEGREE, jnp.nan, result)


def _chebyshev(family: Polynomials, closed: Callable, direct_to: int) -> Callable:
    """Above the degree `direct_to` and inside (-1, 1) the trigonometric form, as in aten: the recurrence would lose digits."""

    def polynomial(x, degree):
        x, degree = _same(x, jnp.trunc(degree))
        inside = (degree > direct_to) & (jnp.abs(x) < 1)
        angle = jnp.arccos(jnp.where(inside, x, 0))
        return jnp.where(inside, closed(degree, angle), evaluate(family, x, jnp.where(inside, 0, degree)))

    return polynomial


chebyshev_t = _chebyshev(CHEBYSHEV_T, lambda n, a: jnp.cos(n * a), 6)
chebyshev_u = _chebyshev(CHEBYSHEV_U, lambda n, a: jnp.sin((n + 1) * a) / jnp.sin(a), 8)
chebyshev_v = _chebyshev(CHEBYSHEV_V, lambda n, a: jnp.cos((n + 0.5) * a) / jnp.cos(a / 2), 8)
chebyshev_w = _chebyshev(CHEBYSHEV_W, lambda n, a: jnp.sin((n + 0.5) * a) / jnp.sin(a / 2), 8)


def _hermite(family: Polynomials) -> Callable:
    """aten gives nan above the degrees that its type can hold."""

    def polynomial(x, degree):
        limit = 128 if x.dtype == jnp.float32 else 512
        return jnp.where(degree > limit, jnp.nan, evaluate(family, x, jnp.minimum(degree, limit)))

    return polynomial


POLYNOMIALS = {
    aten.special_chebyshev_polynomial_t: chebyshev_t,
    aten.special_chebyshev_polynomial_u: chebyshev_u,
    aten.special_chebyshev_polynomial_v: chebyshev_v,
    aten.special_chebyshev_polynomial_w: chebyshev_w,
    aten.special_shifted_chebyshev_polynomial_t: lambda x, n: chebyshev_t(2 * x - 1, n),
    aten.special_shifted_chebyshev_polynomial_u: lambda x, n: chebyshev_u(2 * x - 1, n),
    aten.special_shifted_chebyshev_polynomial_v: lambda x, n: chebyshev_v(2 * x - 1, n),
    aten.special_shifted_chebyshev_polynomial_w: lambda x, n: chebyshev_w(2 * x - 1, n),
    aten.special_hermite_polynomial_h: _hermite(HERMITE_H),
    aten.special_hermite_polynomial_he: _hermite(HERMITE_HE),
    aten.special_laguerre_polynomial_l: lambda x, n: evaluate(LAGUERRE_L, x, n),
    aten.special_legendre_polynomial_p: lambda x, n: evaluate(LEGENDRE_P, x, n),
}
for _target, _fn in POLYNOMIALS.items():
    elementwise(_target)(_fn)
