"""Inverses and gradients of views: a new base with the written part in place, or zeros around a gradient.

>>> _slice_scatter(jnp.zeros(4), jnp.ones(2), 0, 1, 3)
Array([0., 1., 1., 0.], dtype=float64)

A block is placed by dynamic_update_slice, elements that are apart by a select: both fuse, a scatter would
not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .indexing import WITHIN, flat_places, slice_bounds, strided_mask, strided_place, unwindows
from .lowering import aten, op


def _place(x: jax.Array, src: jax.Array, axis: int, first: int, step: int) -> jax.Array:
    """x with src at `first`, `first + step`, ... of an axis."""
    src = src.astype(x.dtype)
    if src.size == 0:
        return x
    if step == 1:
        return lax.dynamic_update_slice_in_dim(x, src, first, axis)
    mask = strided_mask(x.shape, axis, first, src.shape[axis], step)
    return jnp.where(mask, strided_place(src, axis, first, x.shape[axis], step), x)


@op(aten.slice_scatter)
def _slice_scatter(x, src, dim=0, start=None, end=None, step=1):
    dim %= x.ndim
    start, end = slice_bounds(x.shape[dim], start, end)
    shape = (*x.shape[:dim], -(-(end - start) // step), *x.shape[dim + 1 :])
    return _place(x, jnp.broadcast_to(src, shape), dim, start, step)


@op(aten.select_scatter)
def _select_scatter(x, src, dim, index):
    dim %= x.ndim
    return _place(x, jnp.expand_dims(src, dim), dim, index % x.shape[dim], 1)


@op(aten.diagonal_scatter)
def _diagonal_scatter(x, src, offset=0, dim1=0, dim2=1):
    """The two dimensions become a flat last one, where the diagonal is a strided slice."""
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows, columns = moved.shape[-2:]
    flat = moved.reshape(*moved.shape[:-2], rows * columns)
    placed = _place(flat, src, x.ndim - 2, offset if offset >= 0 else -offset * columns, columns + 1)
    return jnp.moveaxis(placed.reshape(moved.shape), (-2, -1), (dim1, dim2))


@op(aten.as_strided_scatter)
def _as_strided_scatter(x, src, size, stride, storage_offset=None):
    """Where elements of the view overlap, aten does not say which one stays."""
    places = flat_places(size, stride, storage_offset or 0)
    return x.reshape(-1).at[places].set(src.astype(x.dtype), **WITHIN).reshape(x.shape)


@op(aten.slice_inverse)
def _slice_inverse(x, src, dim=0, start=None, end=None, step=1):
    """The base from its slice, as functionalisation asks for it: the rest of the base is what `src` holds."""
    return _slice_scatter(src, x, dim, start, end, step)


@op(aten.unfold_backward)
def _unfold_backward(grad, input_sizes, dim, size, step):
    if not input_sizes:
        return grad.reshape(()) if size else jnp.zeros((), grad.dtype)
    dim %= len(input_sizes)
    return unwindows(jnp.moveaxis(grad, -1, dim), dim, input_sizes[dim], step)
