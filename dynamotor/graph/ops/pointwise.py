"""Maps whose layout or shape differs from TensorIterator's rule, which all other pointwise ops follow
(`shapes.py`), and their padding.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..bucket_padding import (
    POINTWISE,
    Call,
    CannotPad,
    Padded,
    Run,
    broadcast_axes,
    settle,
)
from ..kernel_checks import (
    ask_element,
    ask_fill,
)
from ..layouts import (
    ask_eager,
    dense,
    in_row_major,
    is_dim,
    like_argument,
    row_major,
    with_stride,
)
from ..nodes import operand
from ..op_definition import (
    PASS,
    Shape,
    broadcast,
    check,
    contiguous,
    define,
    layout,
    operands,
    padding,
    question,
    require,
    require_equal,
    requires,
    shape,
    shape_of_argument,
)
from ..result_strides import (
    iterated_stride,
    preserved_stride,
)
from ..shapes import (
    iterated_operands,
)
from ..size_nodes import is_size
from ..sizes import Dims, Size
from ..spec import TensorSpec, aten

define(
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    shape=lambda *args: broadcast(operands(args)),
)
define(
    *(aten.pow.Scalar, aten.mvlgamma.default, aten.isin.Tensor_Tensor, aten.glu_backward.default),
    layout=with_stride(in_row_major),
)


def _reversed_stride(args: tuple[Any, ...], out: TensorSpec) -> Dims:
    """TensorIterator's strides where the kernel takes the second operand first."""
    return iterated_stride(iterated_operands(aten.sub.Tensor, (args[1], args[0]), out.dtype), out.shape)


define(aten.rsub.Tensor, aten.leaky_relu_backward.default, layout=with_stride(_reversed_stride))
define(aten.ldexp.Tensor, layout=ask_eager)


@layout(aten.log_sigmoid_forward.default)
def _log_sigmoid_layout(x: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    return dense(x.shape, x), dense((0,) if x.device.type == "cuda" else x.shape, x)


define(aten.fill.Scalar, aten.fill.Tensor, layout=with_stride(like_argument(0)))
# Eager fills a row-major copy.
define(
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    layout=lambda x, mask, value: dense(broadcast([x.shape, mask.shape]), x),
)


@layout(aten.masked_fill_.Scalar)
def _masked_fill_layout(x: TensorSpec, mask: TensorSpec, value: Any) -> Any:
    fits = len(mask.shape) <= len(x.shape) and all(
        m == 1 or m == n for m, n in zip(reversed(mask.shape), reversed(x.shape))
    )
    return x if fits and mask.dtype is torch.bool and mask.device == x.device else PASS


check("masked_fill", "masked_fill_")(ask_fill)
question("masked_fill", "masked_fill_")(ask_element)


@shape(aten.glu.default, contiguous=row_major)
def _glu_shape(x: TensorSpec, dim: int = -1) -> Shape:
    require(is_dim(dim, x) and x.shape[dim] % 2 == 0)
    return tuple([n // 2 if d == dim % len(x.shape) else n for d, n in enumerate(x.shape)])


@shape(aten.complex.default, aten.polar.default, contiguous=row_major)
def _complex_shape(real: TensorSpec, imaginary: TensorSpec) -> Shape:
    require_equal(real.shape, imaginary.shape)
    return real.shape


@layout(
    aten.fake_quantize_per_tensor_affine_cachemask.default,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
    aten.fake_quantize_per_channel_affine_cachemask.default,
    shape=lambda x, *args, **kwargs: [x.shape] * 2,
)
def _fake_quantize_layout(x: TensorSpec, *args: Any, **kwargs: Any) -> tuple[TensorSpec, TensorSpec]:
    """The rounded values, and whether they are in range; PyTorch has no meta kernel."""
    rounded = TensorSpec(x.shape, preserved_stride(x), x.dtype, x.device)
    return rounded, replace(rounded, dtype=torch.bool)


@requires(aten._prelu_kernel.default, shape=shape_of_argument(0), contiguous=row_major)
def _prelu_requires(x: TensorSpec, weight: TensorSpec) -> None:
    require(len(x.shape) == len(weight.shape) and all(w in (1, n) for w, n in zip(weight.shape, x.shape)))


@requires(
    aten._prelu_kernel_backward.default, shape=lambda grad, x, weight: [x.shape] * 2, contiguous=row_major
)
def _prelu_backward_requires(grad: TensorSpec, x: TensorSpec, weight: TensorSpec) -> None:
    require_equal(grad.shape, x.shape)
    _prelu_requires(x, weight)


@requires(aten.glu_backward.default, shape=shape_of_argument(1))
def _glu_backward_requires(grad: TensorSpec, x: TensorSpec, dim: int) -> None:
    require_equal(grad.shape, _glu_shape(x, dim))


@contiguous(aten.glu_backward.default)
def _glu_backward_contiguous(grad: TensorSpec, x: TensorSpec, dim: int) -> Any:
    _glu_backward_requires(grad, x, dim)
    return dense(x.shape, x) if x.dtype.is_floating_point and grad.dtype is x.dtype else PASS


# Padding ----------------------------------------------------------------------------------------------------


_OF_TENSORS = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")
}


@padding(POINTWISE)
def _pointwise_padding(call: Call) -> Padded:
    writer, target = call.writer, call.node.target
    tensors = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, fx.Node)]
    axes = broadcast_axes([writer.axes[a] for a in tensors])
    if call.symbolic:
        target = _OF_TENSORS.get(target, target)
        spec = tensors[0].meta["val"] if tensors else None
        CannotPad.when(
            target not in _OF_TENSORS.values()
            or not spec
            or not (spec.shape or spec.dtype.is_floating_point),
            f"{target} of a size",
        )
        for place in call.symbolic:
            size = settle(operand(call.node, place).meta["val"])
            if type(size) is Size:
                call.args[place] = writer.actual(Run(size))
    CannotPad.when(
        sum(is_size(a) for a in call.node.all_input_nodes) > len({call.node.args[i] for i in call.symbolic}),
        f"{target} of a size",
    )
    return call.emit(axes, target)


@padding(operator.getitem)
def _getitem_padding(call: Call) -> Padded:
    several, place = call.args
    if isinstance(several, tuple):  # a rule gave one node for each result
        return several[place], call.writer.axes[several[place]]
    return call.emit(call.axes(0)[place])
