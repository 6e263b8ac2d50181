"""View ops: what a write to a view does to the value that it views, one row an op.

>>> @inverses.register(aten.select.int)
... def _select(base, new, dim, index):
...     return record(aten.select_scatter.default, (base, new, dim, index))
"""

from __future__ import annotations

import math

from ..autograd.functional import RESHAPED, SCATTERED_BY, UNDONE_BY, turned_back
from .ir import Node, record
from .lowering import aten, rows
from .tensor import Overlap, inverses

_UNDONE_BY = {
    **UNDONE_BY,
    aten.view_as_real.default: aten.view_as_complex.default,
    aten.view_as_complex.default: aten.view_as_real.default,
}
_SCATTERED_BY = {**SCATTERED_BY, aten.as_strided.default: aten.as_strided_scatter.default}

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
            for view, put in _SCATTERED_BY.items()
        },
    },
)


@inverses.register(aten.expand.default)
def _expand(base: Node, new: Node, size: list[int], *, implicit: bool = False) -> Node:
    if math.prod(base.meta.shape) == math.prod(new.meta.shape):
        return record(aten.view.default, (new, list(base.meta.shape)))
    raise Overlap("DM611", "the tensor was expanded")


@inverses.register(aten.unfold.default)
def _unfold(base: Node, new: Node, dim: int, size: int, step: int) -> Node:
    if step < size:
        raise Overlap("DM611", "the windows of unfold overlap")
    ones = record(aten.full_like.default, (new, 1.0))
    sizes = list(base.meta.shape)
    written = record(aten.unfold_backward.default, (ones, sizes, dim, size, step))
    values = record(aten.unfold_backward.default, (new, sizes, dim, size, step))
    return record(aten.where.self, (record(aten.ne.Scalar, (written, 0)), values, base))
