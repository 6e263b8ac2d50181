"""Joining, repeating, turning and shuffling: ops that move elements and compute nothing.

>>> _roll(jnp.arange(4), [1], [0])
Array([3, 0, 1, 2], dtype=int64)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from .dtypes import jax_dtype
from .lowering import Spec, op

aten = torch.ops.aten


@op(aten.cat, aten.concat, out=True)
def _cat(tensors, dim=0, *, out: Spec):
    """Tensors of shape (0,) join with anything, as they always did in PyTorch."""
    dtype = jax_dtype(out.dtype)
    parts = [t.astype(dtype) for t in tensors if t.shape != (0,) or len(out.shape) == 1]
    return jnp.concatenate(parts, dim) if parts else jnp.zeros(out.shape, dtype)


op(aten.repeat)(
    lambda x, repeats: jnp.tile(x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))
)
op(aten.flip)(lambda x, dims: jnp.flip(x, tuple(dims)) if x.ndim else x)
op(aten.tril)(lambda x, diagonal=0: jnp.tril(x, diagonal))
op(aten.triu)(lambda x, diagonal=0: jnp.triu(x, diagonal))


def _count(first: int, rest: Sequence[int]) -> int:
    return first * math.prod(rest)


@op(aten.resize)
def _resize(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """The first elements in a new shape; what lies beyond the old end is zero here and undefined in aten."""
    count = math.prod(size)
    flat = x.reshape(-1)[:count]
    return jnp.pad(flat, (0, count - flat.size)).reshape(tuple(size))
