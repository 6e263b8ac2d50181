"""Complex numbers: made of parts and of polar coordinates, conjugated, negated.

`view_as_real` and `view_as_complex` are with the views, in `ops_view.py`.

>>> torch.polar(torch.tensor([2.0], device="xla"), torch.tensor([0.0], device="xla"))
tensor([2.+0.j], device='xla:0')
"""

from __future__ import annotations

from math import pi

import jax.numpy as jnp
import torch
from jax import lax

from .lowering import op
from .numerics import wide
from .ops_pointwise import is_complex
from .promotion import widened_float

aten = torch.ops.aten


op(aten.complex)(lambda real, imag: lax.complex(*jnp.broadcast_arrays(wide(real), wide(imag))))


@op(aten._conj, aten._conj_physical, aten.conj_physical, aten._conj_copy)
def _conj(x):
    return jnp.conj(x) if is_complex(x) else x


@op(aten._neg_view, aten._neg_view_copy)
def _neg_view(x):
    return -x


@op(aten.angle.default)
def _angle(x):
    """The angle of a complex number; of a real one 0 or π, nan for nan."""
    if is_complex(x):
        return jnp.angle(x)
    x = widened_float(x)
    return jnp.where(x != x, x, jnp.where(x < 0, pi, 0).astype(x.dtype))
