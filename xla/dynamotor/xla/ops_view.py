"""View ops and their `_copy` twins, as plain functions of values: values are row-major, whatever strides
tensors report.

>>> as_strided(jnp.arange(6), (2, 2), (2, 1), 1)    # rows that start 2 apart, from element 1
Array([[1, 2], [3, 4]], dtype=int64)

The recorder knows that a view shares memory with its base: the effect of a write to one on the other is a
row of `inverses` here, which records an inverse op (`slice_scatter`, in `ops_index.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from dynamotor.extension_api import RESHAPED, SCATTERED_BY, UNDONE_BY, TensorSpec, turned_back

from .dtypes import is_complex, jax_dtype
from .ir import Node, record
from .layout import overlaps_itself
from .lowering import Spec, aten, decomposition, op, require, rows
from .ops_index import WITHIN, flat_places, slice_bounds, strided_slice, windows
from .tensor import Overlap, inverses


@op(aten.view.default, aten._unsafe_view, aten.reshape, aten.view_copy.default)
def _view(x, size):
    return x.reshape(tuple(size)) if x.size else x.reshape(_without_unknown(x, size))


def _without_unknown(x: jax.Array, size: Sequence[int]) -> tuple[int, ...]:
    known = math.prod(s for s in size if s != -1)
    return tuple(x.size // max(known, 1) if s == -1 else s for s in size)


@op(aten.expand, aten.expand_copy)
def _expand(x, size, *, implicit=False):
    lead = len(size) - x.ndim
    return jnp.broadcast_to(x, tuple(x.shape[i - lead] if s == -1 else s for i, s in enumerate(size)))


@op(aten.slice.Tensor, aten.slice_copy.Tensor)
def _slice(x, dim=0, start=None, end=None, step=1):
    dim %= x.ndim
    start, end = slice_bounds(x.shape[dim], start, end)
    return lax.slice_in_dim(x, start, end, step, dim)


@op(aten.squeeze, aten.squeeze_copy)
def _squeeze(x, dim=None):
    dims = (
        range(x.ndim)
        if dim is None
        else [d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)]
    )
    return lax.squeeze(x, [d for d in dims if d < x.ndim and x.shape[d] == 1])


@op(aten.diagonal, aten.diagonal_copy)
def diagonal(x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    """The diagonal of two dimensions as the last one: every (columns + 1)-th element of the flattened
    matrix.
    """
    x = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows, columns = x.shape[-2:]
    length = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    first = (offset if offset >= 0 else -offset * columns) if length else 0
    return strided_slice(x.reshape(*x.shape[:-2], rows * columns), x.ndim - 2, first, length, columns + 1)


@op(aten.unfold, aten.unfold_copy)
def _unfold(x, dimension, size, step):
    if x.ndim == 0:
        return x.reshape(1)[:size]
    dimension %= x.ndim
    return jnp.moveaxis(windows(x, dimension, size, step), dimension, -1)


rows(
    op,
    {
        (
            aten.alias,
            aten.detach,
            aten.lift,
            aten.lift_fresh,
            aten.alias_copy,
            aten.detach_copy,
            aten.lift_fresh_copy,
            aten.contiguous,
            aten.resolve_conj,
            aten.resolve_neg,
        ): lambda x: x,
        (aten._reshape_alias, aten._reshape_alias_copy): lambda x, size, stride: x.reshape(tuple(size)),
        (aten.permute, aten.permute_copy): lambda x, dims: jnp.transpose(x, [d % x.ndim for d in dims]),
        (aten.transpose.int, aten.transpose_copy.int): lambda x, dim0, dim1: (
            jnp.swapaxes(x, dim0, dim1) if x.ndim else x
        ),
        (aten.t, aten.t_copy): lambda x: x.T,
        (aten.select.int, aten.select_copy.int): lambda x, dim, index: lax.index_in_dim(
            x, index, dim % x.ndim, keepdims=False
        ),
        (aten.unsqueeze, aten.unsqueeze_copy): lambda x, dim: jnp.expand_dims(x, dim),
        (aten.view_as_real, aten.view_as_real_copy): lambda x: jnp.stack([x.real, x.imag], -1),
        (aten.view_as_complex, aten.view_as_complex_copy): lambda x: lax.complex(x[..., 0], x[..., 1]),
    },
)


# The other ops that give several parts are views, or PyTorch's decompositions into views.
decomposition(aten.split_copy.Tensor)(lambda x, size, dim=0: [part.clone() for part in x.split(size, dim)])


@op(aten.view.dtype, aten.view_copy.dtype, out=True)
def _view_dtype(x, dtype, *, out: Spec):
    """The same bytes as another dtype: the last dimension grows or shrinks with the sizes of the items."""
    target = jax_dtype(dtype)
    if x.dtype == target:
        return x
    require(
        target.itemsize == dtype.itemsize,
        f"{dtype} is not kept in its own width, so its bytes are not there to be seen",
    )
    if is_complex(x.dtype):
        x = (
            jnp.stack([x.real, x.imag], -1).reshape(*x.shape[:-1], -1)
            if x.ndim
            else jnp.stack([x.real, x.imag])
        )
    if is_complex(target):
        half = jnp.dtype(jnp.float32 if target == jnp.complex64 else jnp.float64)
        parts = _bitcast(x, half, (*out.shape, 2))
        return lax.complex(parts[..., 0], parts[..., 1])
    return _bitcast(x, target, out.shape)


def _bitcast(x: jax.Array, target: jnp.dtype, shape: tuple[int, ...]) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if target == jnp.bool_:
        return _bitcast(x, jnp.dtype(jnp.uint8), shape) != 0
    if target.itemsize > x.dtype.itemsize:
        x = x.reshape(*shape, target.itemsize // x.dtype.itemsize)
    return lax.bitcast_convert_type(x, target).reshape(shape)


@op(aten.as_strided, aten.as_strided_copy)
def as_strided(
    x: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> jax.Array:
    """Elements of the flattened x at offset + sum of index*stride. Slices and reshapes where the steps nest,
    else a gather.

    An element beyond the end of x is a mistake that aten reports and XLA does not: the last one is read.
    """
    flat, offset = x.reshape(-1), storage_offset or 0
    if 0 in size:
        return jnp.zeros(tuple(size), x.dtype)
    dims = sorted((d for d in range(len(size)) if size[d] > 1 and stride[d] > 0), key=lambda d: -stride[d])
    if not nested([size[d] for d in dims], [stride[d] for d in dims]):
        return flat.at[flat_places(size, stride, offset)].get(**WITHIN)
    block = lax.slice_in_dim(flat, offset, flat.size)
    lead: list[int] = []
    for d in dims:
        block = _fit(block, size[d] * stride[d]).reshape(*lead, size[d], stride[d])
        lead.append(size[d])
    block = _fit(block, 1).reshape(lead)
    order = sorted(range(len(dims)), key=dims.__getitem__)
    block = jnp.transpose(block, order).reshape([s if d in dims else 1 for d, s in enumerate(size)])
    return jnp.broadcast_to(block, tuple(size))


def nested(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether dimensions, given by falling stride, nest without overlap."""
    return all((n - 1) * s + 1 <= outer for outer, n, s in zip(strides, sizes[1:], strides[1:]))


def _fit(block: jax.Array, length: int) -> jax.Array:
    """The last dimension cut or filled up to a length; the filling is never read."""
    missing = length - block.shape[-1]
    return lax.pad(block, jnp.zeros((), block.dtype), [(0, 0, 0)] * (block.ndim - 1) + [(0, missing, 0)])


# -- the effect of a write to a view on the viewed value --------------------------------------------------


_UNDONE_BY = {
    **UNDONE_BY,
    aten.view_as_real.default: aten.view_as_complex.default,
    aten.view_as_complex.default: aten.view_as_real.default,
}
rows(
    inverses.register,
    {
        RESHAPED: lambda base, new, *args: record(aten.view.default, (new, list(base.meta.shape))),
        aten.alias.default: lambda base, new: new,
        aten.view.dtype: lambda base, new, dtype: record(aten.view.dtype, (new, base.meta.dtype)),
        aten.permute.default: lambda base, new, dims: record(aten.permute.default, (new, turned_back(dims))),
        **{
            view: lambda base, new, *args, undo=undo: record(undo, (new, *args))
            for view, undo in _UNDONE_BY.items()
        },
        **{
            view: lambda base, new, *args, put=put, **named: record(put, (base, new, *args), named)
            for view, put in SCATTERED_BY.items()
        },
    },
)


@inverses.register(aten.expand.default)
def _expand_written(base: Node, new: Node, size: list[int], *, implicit: bool = False) -> Node:
    if math.prod(base.meta.shape) == math.prod(new.meta.shape):
        return record(aten.view.default, (new, list(base.meta.shape)))
    raise Overlap("DM611", "the tensor was expanded")


@inverses.register(aten.as_strided.default)
def _strided_written(base: Node, new: Node, size: list[int], stride: list[int], offset: int) -> Node:
    if overlaps_itself(TensorSpec(tuple(size), tuple(stride), base.meta.dtype)):
        raise Overlap("DM611", "elements of as_strided share memory")
    return record(aten.as_strided_scatter.default, (base, new, size, stride, offset))


@inverses.register(aten.unfold.default)
def _unfold_written(base: Node, new: Node, dim: int, size: int, step: int) -> Node:
    if step < size:
        raise Overlap("DM611", "the windows of unfold overlap")
    ones = record(aten.full_like.default, (new, 1.0))
    sizes = list(base.meta.shape)
    written = record(aten.unfold_backward.default, (ones, sizes, dim, size, step))
    values = record(aten.unfold_backward.default, (new, sizes, dim, size, step))
    return record(aten.where.self, (record(aten.ne.Scalar, (written, 0)), values, base))
