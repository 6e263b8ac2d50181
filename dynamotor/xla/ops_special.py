"""Special functions: error functions, gamma and zeta functions, modified Bessel functions of the first kind.
Complex numbers made of parts, conjugated, negated; Fourier transforms.

Bessel functions J, Y and K, Airy's function and orthogonal polynomials have no rule: XLA knows none, and they
run on the CPU.

>>> torch.special.zeta(torch.tensor([2.0], device="xla"), 1)
tensor([1.6449], device='xla:0')
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from math import factorial, pi

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from .dtypes import wide
from .lowering import Spec, aten, op, rows
from .promotion import cast, compute_dtype, elementwise, widened_float


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
