"""Joining, padding, repeating, turning and shuffling: ops that move elements and compute nothing.

>>> _resize(jnp.arange(4), [2, 1])
Array([[0],
       [1]], dtype=int64)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from .dtypes import LOW_PRECISION, jax_dtype
from .lowering import Spec, aten, op, rows


@op(aten.cat, aten.concat, out=True)
def _cat(tensors, dim=0, *, out: Spec):
    """Tensors of shape (0,) join with anything, as they always did in PyTorch."""
    dtype = jax_dtype(out.dtype)
    parts = [t.astype(dtype) for t in tensors if t.shape != (0,) or len(out.shape) == 1]
    return jnp.concatenate(parts, dim) if parts else jnp.zeros(out.shape, dtype)


rows(
    op,
    {
        aten.repeat: lambda x, repeats: jnp.tile(
            x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats)
        ),
        aten.flip: lambda x, dims: jnp.flip(x, tuple(dims)) if x.ndim else x,
        aten.tril: lambda x, diagonal=0: jnp.tril(x, diagonal),
        aten.triu: lambda x, diagonal=0: jnp.triu(x, diagonal),
    },
)


@op(aten.resize)
def _resize(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """The first elements in a new shape; what lies beyond the old end is zero here and undefined in aten."""
    count = math.prod(size)
    flat = x.reshape(-1)[:count]
    return jnp.pad(flat, (0, count - flat.size)).reshape(tuple(size))


# -- padding, where a negative width cuts ----------------------------------------------------------------------


@op(aten.constant_pad_nd)
def _constant_pad(x, pad, value=0):
    """`pad` lists (before, after) from the last dimension on."""
    widths = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        widths[-1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, jnp.asarray(value).astype(x.dtype), widths)


def _padded(x: jax.Array, padding: Sequence[int], mode: str) -> jax.Array:
    widths = [(0, 0)] * (x.ndim - len(padding) // 2) + [*zip(padding[-2::-2], padding[::-2])]
    x = jnp.pad(x, [(max(before, 0), max(after, 0)) for before, after in widths], mode)
    return x[
        tuple([slice(max(-before, 0), n - max(-after, 0)) for n, (before, after) in zip(x.shape, widths)])
    ]


def _transposed(rule: Callable, grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
    """Padding is linear: its transpose adds the gradients of all copies of an element, those of half floats
    in float32.
    """
    wide = jnp.dtype(jnp.float32) if grad.dtype in LOW_PRECISION else grad.dtype
    _, pull = jax.vjp(lambda value: rule(value, padding), jnp.zeros(x.shape, wide))
    return pull(grad.astype(wide))[0]


for _name, _mode in (("reflection", "reflect"), ("replication", "edge")):
    for _dims in ("1d", "2d", "3d"):
        op(getattr(aten, f"{_name}_pad{_dims}"))(partial(_padded, mode=_mode))
        op(getattr(aten, f"{_name}_pad{_dims}_backward"))(partial(_transposed, partial(_padded, mode=_mode)))
