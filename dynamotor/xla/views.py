"""View ops: what a write to a view does to the value that it views, one row an op.

>>> @inverses.register(aten.select.int)
... def _select(base, new, dim, index):
...     return record(aten.select_scatter.default, (base, new, dim, index))
"""

from __future__ import annotations

import math

from .ir import Node, record
from .lowering import aten, rows
from .tensor import Overlap, inverses

rows(
    inverses.register,
    {
        (
            aten.view.default,
            aten._reshape_alias.default,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ): lambda base, new, *args: record(aten.view.default, (new, list(base.meta.shape))),
        aten.alias.default: lambda base, new: new,
        aten.view.dtype: lambda base, new, dtype: record(aten.view.dtype, (new, base.meta.dtype)),
        # What one op on the new value undoes, with the view's own arguments.
        **{
            view: lambda base, new, *args, undo=undo: record(undo, (new, *args))
            for view, undo in {
                aten.t.default: aten.t.default,
                aten.transpose.int: aten.transpose.int,
                aten._conj.default: aten.conj_physical.default,
                aten._neg_view.default: aten.neg.default,
                aten.view_as_real.default: aten.view_as_complex.default,
                aten.view_as_complex.default: aten.view_as_real.default,
            }.items()
        },
        # What one op puts into the base, with the view's own arguments.
        **{
            view: lambda base, new, *args, put=put, **named: record(put, (base, new, *args), named)
            for view, put in {
                aten.select.int: aten.select_scatter.default,
                aten.slice.Tensor: aten.slice_scatter.default,
                aten.diagonal.default: aten.diagonal_scatter.default,
                aten.as_strided.default: aten.as_strided_scatter.default,
            }.items()
        },
    },
)


@inverses.register(aten.permute.default)
def _permute(base: Node, new: Node, dims: list[int]) -> Node:
    order = [dim % len(dims) for dim in dims]
    return record(aten.permute.default, (new, sorted(range(len(order)), key=order.__getitem__)))


@inverses.register(aten.expand.default)
def _expand(base: Node, new: Node, size: list[int], *, implicit: bool = False) -> Node:
    if math.prod(base.meta.shape) == math.prod(new.meta.shape):
        return record(aten.view.default, (new, list(base.meta.shape)))
    raise Overlap(
        "DM611",
        "unsupported operation: more than one element of the written-to tensor refers to a single memory location",
        why="the tensor was expanded, and an in-place operation writes it",
        cure="clone() the tensor before the operation",
    )


@inverses.register(aten.unfold.default)
def _unfold(base: Node, new: Node, dim: int, size: int, step: int) -> Node:
    if step < size:
        raise Overlap(
            "DM611",
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location",
            why="the windows of unfold overlap, and an in-place operation writes them",
            cure="clone() the tensor before the operation",
        )
    ones = record(aten.full_like.default, (new, 1.0))
    sizes = list(base.meta.shape)
    written = record(aten.unfold_backward.default, (ones, sizes, dim, size, step))
    values = record(aten.unfold_backward.default, (new, sizes, dim, size, step))
    return record(aten.where.self, (record(aten.ne.Scalar, (written, 0)), values, base))
