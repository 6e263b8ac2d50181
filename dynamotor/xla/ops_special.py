"""Special functions: error functions, gamma and zeta functions, modified Bessel functions of the first kind.

Bessel functions J, Y and K, Airy's function and orthogonal polynomials have no rule: XLA knows none, and they
run on the CPU.

>>> torch.special.zeta(torch.tensor([2.0], device="xla"), 1)
tensor([1.6449], device='xla:0')
"""

from __future__ import annotations

from functools import partial
from math import factorial, pi

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from .lowering import Spec, aten, op, rows
from .promotion import cast, compute_dtype, elementwise


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
