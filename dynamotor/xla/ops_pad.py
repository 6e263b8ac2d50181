"""Padding: by a constant, by reflection and by repeating the border. A negative width cuts, as in aten.

>>> _reflection(jnp.arange(4), [2, 1])
Array([2, 1, 0, 1, 2, 3, 2], dtype=int64)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import torch
from jax import lax

from .dtypes import LOW_PRECISION
from .lowering import op

aten = torch.ops.aten
Border = Callable[[jax.Array, int, int, int], jax.Array]


@op(aten.constant_pad_nd)
def _constant_pad(x, pad, value=0):
    """`pad` lists (before, after) from the last dimension on."""
    widths = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        widths[-1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, jnp.asarray(value).astype(x.dtype), widths)


def _bordered(x: jax.Array, padding: Sequence[int], border: Border) -> jax.Array:
    for i in range(len(padding) // 2):
        before, after, axis = padding[2 * i], padding[2 * i + 1], x.ndim - 1 - i
        if before > 0 or after > 0:
            parts = [border(x, axis, -1, before)] if before > 0 else []
            x = jnp.concatenate([*parts, x, *([border(x, axis, 1, after)] if after > 0 else [])], axis)
        x = lax.slice_in_dim(x, max(-before, 0), x.shape[axis] - max(-after, 0), 1, axis)
    return x


def _mirror(x: jax.Array, axis: int, side: int, width: int) -> jax.Array:
    """The elements next to the border one, in reverse."""
    start = 1 if side < 0 else x.shape[axis] - 1 - width
    return lax.rev(lax.slice_in_dim(x, start, start + width, 1, axis), (axis,))


def _repeated(x: jax.Array, axis: int, side: int, width: int) -> jax.Array:
    edge = lax.slice_in_dim(x, 0, 1, 1, axis) if side < 0 else lax.slice_in_dim(x, x.shape[axis] - 1, x.shape[axis], 1, axis)
    return jnp.broadcast_to(edge, (*x.shape[:axis], width, *x.shape[axis + 1 :]))


@op(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d)
def _reflection(x, padding):
    return _bordered(x, padding, _mirror)


@op(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d)
def _replication(x, padding):
    return _bordered(x, padding, _repeated)


def _transposed(rule: Callable, grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
    """Padding is linear: its transpose adds the gradients of all copies of an element, those of half floats in float32."""
    wide = jnp.dtype(jnp.float32) if grad.dtype in LOW_PRECISION else grad.dtype
    _, pull = jax.vjp(lambda value: rule(value, padding), jnp.zeros(x.shape, wide))
    return pull(grad.astype(wide))[0]


for _dims in ("1d", "2d", "3d"):
    op(getattr(aten, f"reflection_pad{_dims}_backward"))(partial(_transposed, _reflection))
    op(getattr(aten, f"replication_pad{_dims}_backward"))(partial(_transposed, _replication))
