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
from .indexing import unwindows, windows
from .lowering import Spec, op

aten = torch.ops.aten


@op(aten.cat, aten.concat, out=True)
def _cat(tensors, dim=0, *, out: Spec):
    """Tensors of shape (0,) join with anything, as they always did in PyTorch."""
    dtype = jax_dtype(out.dtype)
    parts = [t.astype(dtype) for t in tensors if t.shape != (0,) or len(out.shape) == 1]
    return jnp.concatenate(parts, dim) if parts else jnp.zeros(out.shape, dtype)


@op(aten.stack, out=True)
def _stack(tensors, dim=0, *, out: Spec):
    dtype = jax_dtype(out.dtype)
    return jnp.stack([t.astype(dtype) for t in tensors], dim)


@op(aten.block_diag, out=True)
def _block_diag(tensors, *, out: Spec):
    """Each block is padded to the whole width; rows are then joined."""
    dtype = jax_dtype(out.dtype)
    left, rows = 0, []
    for block in (t.astype(dtype) for t in tensors):
        block = block.reshape(1, -1) if block.ndim < 2 else block
        rows.append(jnp.pad(block, ((0, 0), (left, out.shape[1] - left - block.shape[1]))))
        left += block.shape[1]
    return jnp.concatenate(rows)


@op(aten.repeat)
def _repeat(x, repeats):
    return jnp.tile(x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))


@op(aten.roll)
def _roll(x, shifts, dims=()):
    if x.size == 0:
        return x
    if not dims:
        return jnp.roll(x.reshape(-1), shifts[0]).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), tuple(dims))


@op(aten.flip)
def _flip(x, dims):
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@op(aten.rot90)
def _rot90(x, k=1, dims=(0, 1)):
    return jnp.rot90(x, k, tuple(dims))


@op(aten.tril)
def _tril(x, diagonal=0):
    return jnp.tril(x, diagonal)


@op(aten.triu)
def _triu(x, diagonal=0):
    return jnp.triu(x, diagonal)


@op(aten.pixel_shuffle)
def _pixel_shuffle(x, upscale_factor):
    r = upscale_factor
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels // (r * r), r, r, height, width)
    n = len(lead)
    x = jnp.transpose(x, (*range(n + 1), n + 3, n + 1, n + 4, n + 2))
    return x.reshape(*lead, channels // (r * r), height * r, width * r)


@op(aten.pixel_unshuffle)
def _pixel_unshuffle(x, downscale_factor):
    r = downscale_factor
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels, height // r, r, width // r, r)
    n = len(lead)
    x = jnp.transpose(x, (*range(n + 1), n + 2, n + 4, n + 1, n + 3))
    return x.reshape(*lead, channels * r * r, height // r, width // r)


@op(aten.channel_shuffle, aten.native_channel_shuffle)
def _channel_shuffle(x, groups):
    batch, channels, *rest = x.shape
    return jnp.swapaxes(x.reshape(batch, groups, channels // groups, *rest), 1, 2).reshape(x.shape)


@op(aten.im2col)
def _im2col(x, kernel_size, dilation, padding, stride):
    """(N, C, H, W) to (N, C·kh·kw, windows), or without N: the windows of each dimension in turn."""
    batched = x if x.ndim == 4 else x[None]
    (ph, pw), (dh, dw), (sh, sw) = padding, dilation, stride
    padded = jnp.pad(batched, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    cols = windows(windows(padded, 2, kernel_size[0], sh, dh), 4, kernel_size[1], sw, dw)  # N, C, kh, oh, kw, ow
    n, c, kh, oh, kw, ow = cols.shape
    cols = jnp.swapaxes(cols, 3, 4).reshape(n, c * kh * kw, oh * ow)
    return cols if x.ndim == 4 else cols[0]


@op(aten.col2im)
def _col2im(x, output_size, kernel_size, dilation, padding, stride):
    """Transpose of im2col: overlapping windows are added."""
    (height, width), (kh, kw), (dh, dw), (ph, pw), (sh, sw) = output_size, kernel_size, dilation, padding, stride
    batched = x if x.ndim == 3 else x[None]
    sizes = zip(output_size, padding, dilation, kernel_size, stride)
    oh, ow = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, p, d, k, s in sizes)
    n = batched.shape[0]
    channels = batched.shape[1] // (kh * kw)
    cols = jnp.swapaxes(batched.reshape(n, channels, kh, kw, oh, ow), 3, 4)
    image = unwindows(unwindows(cols, 4, width + 2 * pw, sw, dw), 2, height + 2 * ph, sh, dh)
    image = image[:, :, ph : ph + height, pw : pw + width]
    return image if x.ndim == 3 else image[0]


@op(aten._chunk_cat, out=True)
def _chunk_cat(tensors, dim, num_chunks, *, out: Spec):
    """Each tensor is padded to whole chunks along `dim`; chunk i of the result is chunk i of every tensor, flattened."""
    dim %= min(t.ndim for t in tensors)
    dtype = jax_dtype(out.dtype)
    rows = []
    for t in (t.astype(dtype) for t in tensors):
        length = -(-t.shape[dim] // num_chunks) * num_chunks
        padded = jnp.pad(t, [(0, length - t.shape[d] if d == dim else 0) for d in range(t.ndim)])
        rows.append(padded.reshape(*t.shape[:dim], num_chunks, _count(length // num_chunks, t.shape[dim + 1 :])))
    return jnp.concatenate(rows, dim + 1)


def _count(first: int, rest: Sequence[int]) -> int:
    return first * math.prod(rest)


@op(aten.resize)
def _resize(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """The first elements in a new shape; what lies beyond the old end is zero here and undefined in aten."""
    count = math.prod(size)
    flat = x.reshape(-1)[:count]
    return jnp.pad(flat, (0, count - flat.size)).reshape(tuple(size))
