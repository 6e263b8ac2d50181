"""Matrix products and decompositions."""

from __future__ import annotations

import torch

from ..bucket_padding import (
    Axes,
    Call,
    CannotPad,
    Padded,
    broadcast_axes,
    is_padded,
)
from ..layouts import (
    ask_eager,
    row_major,
)
from ..op_definition import (
    Shape,
    broadcast,
    define,
    layout,
    padding,
    require,
    require_numbers,
    shape,
)
from ..sizes import Dims
from ..spec import TensorSpec, aten


@shape(aten.mm.default, aten.bmm.default, layout=row_major)
def _product_shape(a: TensorSpec, b: TensorSpec) -> Shape:
    require(a.shape[-1] == b.shape[-2] and all(x == y for x, y in zip(a.shape[:-2], b.shape[:-2])))
    return (*a.shape[:-1], b.shape[-1])


define(
    aten.addmm.default,
    aten.baddbmm.default,
    shape=lambda x, a, b, **kwargs: broadcast([x.shape, _product_shape(a, b)]),
    layout=row_major,
)
define(aten.trace.default, shape=lambda x: ())
define(aten.addbmm.default, shape=lambda x, a, b, **kwargs: broadcast([x.shape, _product_shape(a, b)[1:]]))


@shape(aten.mv.default)
def _matrix_vector_shape(a: TensorSpec, b: TensorSpec) -> Shape:
    require(a.shape[1] == b.shape[0])
    return a.shape[:1]


define(aten.addmv.default, shape=lambda x, a, b, **kwargs: broadcast([x.shape, _matrix_vector_shape(a, b)]))
define(aten.addr.default, shape=lambda x, a, b, **kwargs: broadcast([x.shape, (*a.shape, *b.shape)]))


def _contract(call: Call, a: int, b: int, batch: int) -> Axes:
    """Axes of the product of two arguments; what both are summed over is masked."""
    left, right = call.axes(a), call.axes(b)
    CannotPad.when(left[-1] != right[-2], "a product with padding at different places")
    outer = broadcast_axes([left[:batch], right[:batch]])
    if is_padded(left[-1]):
        call.mask(a, [len(left) - 1])
        call.mask(b, [len(right) - 2])
    return (*outer, left[-2], right[-1])


define(aten.mm.default, padding=lambda call: call.emit(_contract(call, 0, 1, 0)))
define(aten.bmm.default, padding=lambda call: call.emit(_contract(call, 0, 1, 1)))


@padding(aten.addmm.default, aten.baddbmm.default)
def _addmm_padding(call: Call) -> Padded:
    axes = _contract(call, 1, 2, 0 if call.node.target is aten.addmm.default else 1)
    return call.emit(broadcast_axes([call.axes(0), axes]))


@layout(aten._grouped_mm.default)
def grouped_layout(
    x: TensorSpec,
    weight: TensorSpec,
    offs: TensorSpec | None = None,
    bias: TensorSpec | None = None,
    out_dtype: torch.dtype | None = None,
) -> TensorSpec:
    """Rows of the result start at multiples of 16 bytes."""
    dtype = out_dtype or x.dtype
    shape: Dims = (x.shape[-2], weight.shape[-1])
    if len(x.shape) == len(weight.shape):
        shape = (x.shape[0] if len(x.shape) == 3 else offs.shape[0] if offs is not None else 0, *shape)
    step = 16 // dtype.itemsize
    row = -(-shape[-1] // step) * step
    return TensorSpec(shape, (shape[-2] * row, row, 1)[-len(shape) :], dtype, x.device)


# Decompositions ---------------------------------------------------------------------------------------------
define(
    aten._linalg_svd.default,
    aten.linalg_eig.default,
    aten.linalg_inv_ex.default,
    aten.geqrf.default,
    layout=ask_eager,
)
# No shape function of PyTorch's checks the sizes of these.
define(aten.lu_unpack.default, aten.linalg_lu_solve.default, aten.ormqr.default, requires=require_numbers)
