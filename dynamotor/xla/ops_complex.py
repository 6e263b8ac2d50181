"""Complex numbers: made of parts and of polar coordinates, conjugated, negated; Fourier transforms.

`view_as_real` and `view_as_complex` are with the views, in `ops_view.py`.

>>> torch.polar(torch.tensor([2.0], device="xla"), torch.tensor([0.0], device="xla"))
tensor([2.+0.j], device='xla:0')
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .dtypes import wide
from .lowering import aten, op, rows
from .promotion import widened_float


@op(aten._conj, aten._conj_physical, aten.conj_physical, aten._conj_copy)
def _conj(x):
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


rows(
    op,
    {
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


# -- Fourier transforms: `normalization` is 0 (none), 1 (by the root of n) or 2 (by n) -------------------------


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
