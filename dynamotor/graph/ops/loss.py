"""Losses, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from ..bucket_padding import (
    Call,
    CannotPad,
    Padded,
    untouched,
)
from ..layouts import (
    dense,
    dense_as,
    in_row_major,
    like_argument,
    row_major,
    with_dtype_of,
    with_stride,
)
from ..op_definition import (
    PASS,
    Shape,
    broadcast,
    define,
    layout,
    operands,
    padding,
    require,
    require_channels,
    require_equal,
    require_numbers,
    shape,
    shape_of_argument,
)
from ..shapes import (
    infer_by_meta_kernel,
)
from ..sizes import equal
from ..spec import TensorSpec, aten

# Of classes -------------------------------------------------------------------------------------------------


@shape(
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    requires=lambda x, target, weight, *args: require_channels(
        x.shape[0] if len(x.shape) == 1 else x.shape[1], weight
    ),
)
def _nll_loss_shape(
    x: TensorSpec, target: TensorSpec, weight: TensorSpec | None, reduction: int, *args: Any
) -> list[Shape]:
    require(
        all(
            a == b
            for a, b in zip((x.shape[:1] if len(x.shape) == 2 else (x.shape[0], *x.shape[2:])), target.shape)
        )
    )
    return [target.shape if reduction == 0 else (), ()]


define(aten.nll_loss_forward.default, layout=row_major)
define(aten.nll_loss2d_forward.default, layout=with_stride(in_row_major))


@padding(aten.nll_loss_forward.default)
def _nll_loss_padding(call: Call) -> Padded:
    """Rows of padding are such as the loss ignores."""
    axes = call.axes(0)
    untouched(call, 0, len(axes) - 1)
    call.mask(0, range(len(axes)))
    call.mask(1, [0], call.args[4])
    return call.emit((axes[:1] if call.args[3] == 0 else (), ()))


define(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, shape=shape_of_argument(1))
define(aten.nll_loss_backward.default, layout=dense_as(1))


@padding(aten.nll_loss_backward.default)
def _nll_loss_backward_padding(call: Call) -> Padded:
    axes = call.axes(1)
    untouched(call, 1, len(axes) - 1)
    call.mask(1, range(len(axes)))
    call.mask(2, [0], call.args[5])
    if call.axes(0):
        call.mask(0, [0])
    return call.emit(axes)


@layout(aten.multilabel_margin_loss_forward.default, requires=require_numbers)
def _multilabel_margin_loss_layout(
    x: TensorSpec, target: TensorSpec, reduction: int
) -> tuple[TensorSpec, TensorSpec]:
    shape = x.shape[:-1] if reduction == 0 else ()
    return TensorSpec.dense(shape, x.dtype, x.device), TensorSpec.dense(target.shape, x.dtype, x.device)


# PyTorch's shape function does not check sizes.
# Without a meta kernel.
define(
    aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default, layout=dense_as(1)
)
# Of numbers -------------------------------------------------------------------------------------------------


@shape(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
def _loss_shape(x: TensorSpec, target: TensorSpec, reduction: int = 1, *args: Any) -> Shape:
    shape = broadcast([x.shape, target.shape])
    return shape if reduction == 0 else ()


@layout(aten.mse_loss.default, aten.smooth_l1_loss.default)
def _loss_layout(x: TensorSpec, target: TensorSpec, reduction: int = 1, *args: Any) -> Any:
    alike = equal(x.shape, target.shape) and x.dtype is target.dtype and x.dtype.is_floating_point
    return dense((), x) if alike and reduction in (1, 2) else PASS


define(
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    shape=lambda *args: broadcast(operands(args)) if args[-1] == 0 else (),
)
define(aten.huber_loss.default, aten.soft_margin_loss.default, layout=with_dtype_of(0))
define(
    aten.binary_cross_entropy_with_logits.default,
    requires=lambda x, target, *args: require_equal(x.shape, target.shape),
    layout=with_dtype_of(1),
    contiguous=row_major,
)


def _require_alike(call: Call, a: int, b: int) -> None:
    """Two arguments are of one type with the digits to sum in it, and of one shape."""
    types = {call.args[place].meta["val"].dtype for place in (a, b)}
    CannotPad.when(
        call.axes(a) != call.axes(b) or not types < {torch.float32, torch.float64},
        f"{call.node.target} of tensors that differ, or of halves",
    )


@padding(aten.mse_loss.default)
def _mse_loss_padding(call: Call) -> Padded:
    axes, writer = call.axes(0), call.writer
    reduction = call.args[2] if len(call.args) > 2 else call.kwargs.get("reduction", 1)
    _require_alike(call, 0, 1)
    if reduction == 0:
        return call.emit(axes)
    for place in (0, 1):
        call.mask(place, range(len(axes)))
    call.args, call.kwargs = [*call.args[:2], 2], {}
    if reduction == 2:
        return call.emit(())
    total = writer.op(aten.mse_loss.default, *call.args)
    call.args = [total, writer.divisor(axes, total.meta["val"].dtype)]
    return call.emit((), aten.div.Tensor)


@layout(aten.mse_loss_backward.default, shape=shape_of_argument(1))
def _mse_loss_backward_layout(
    grad: TensorSpec, x: TensorSpec, target: TensorSpec, reduction: int
) -> TensorSpec:
    alike = equal(x.shape, target.shape) and (not grad.shape or equal(grad.shape, x.shape))
    if alike and {grad.dtype, target.dtype} == {x.dtype} and x.dtype.is_floating_point:
        return dense(x.shape, x)
    out = infer_by_meta_kernel(aten.mse_loss_backward.default, (grad, x, target, reduction), {})
    return TensorSpec.dense(out.shape, out.dtype, out.device)


define(aten.huber_loss_backward.default, shape=shape_of_argument(1), layout=with_stride(in_row_major))
define(
    aten.binary_cross_entropy_backward.default,
    shape=shape_of_argument(1),
    layout=with_stride(like_argument(1)),
)
define(aten.smooth_l1_loss_backward.default, aten.soft_margin_loss_backward.default, layout=dense_as(1))


@padding(aten.mse_loss_backward.default)
def _mse_loss_backward_padding(call: Call) -> Padded:
    axes, writer = call.axes(1), call.writer
    _require_alike(call, 1, 2)
    if call.args[3] != 1:
        return call.emit(axes)
    call.args[3] = 2
    call.args = [writer.op(aten.mse_loss_backward.default, *call.args), writer.count(axes)]
    return call.emit(axes, aten.div.Tensor)
