"""Convolutions, and images as rows of windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...base import compat
from ..bucket_padding import (
    Axes,
    Call,
    CannotPad,
    Padded,
    axis_of,
    is_padded,
    row_of,
)
from ..layouts import (
    dense,
)
from ..op_definition import (
    Shape,
    layout,
    padding,
    require,
    require_channels,
    requires,
    shape,
    shapes_of,
)
from ..result_strides import (
    suggests_channels_last,
)
from ..shapes import (
    infer_by_meta_kernel,
)
from ..sizes import is_symbolic
from ..spec import TensorSpec, aten, channels_last_stride, contiguous_stride


@shape(aten.convolution.default)
def _convolution_shape(
    x: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Shape:
    rank = len(weight.shape) - 2
    if not is_symbolic(x.shape[:1]) and x.shape[0] == 1:
        require(
            x.numel > 20480 or x.numel <= 20480
        )  # PyTorch takes another kernel, with another layout, for small images
    stride, padding, dilation, more = (
        [*v] * rank if len(v) == 1 else [*v] for v in (stride, padding, dilation, output_padding)
    )
    spatial = []
    for d in range(rank):
        window = dilation[d] * (weight.shape[2 + d] - 1)
        n = x.shape[len(x.shape) - rank + d]
        spatial.append(
            (n - 1) * stride[d] - 2 * padding[d] + window + more[d] + 1
            if transposed
            else (n + 2 * padding[d] - window - 1) // stride[d] + 1
        )
    return (x.shape[0], weight.shape[1] * groups if transposed else weight.shape[0], *spatial)


@requires(aten.convolution.default)
def _convolution_requires(
    x: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> None:
    rank = len(weight.shape) - 2
    require(x.shape[-rank - 1] == (weight.shape[0] if transposed else weight.shape[1] * groups))
    require(weight.shape[0] % groups == 0)
    require_channels(weight.shape[1] * groups if transposed else weight.shape[0], bias)
    if not transposed:
        padding, dilation = ([*v] * rank if len(v) == 1 else [*v] for v in (padding, dilation))
        for n, k, p, d in zip(x.shape[-rank:], weight.shape[2:], padding, dilation):
            require(n + 2 * p >= d * (k - 1) + 1)


def _convolved(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, *args: Any) -> TensorSpec:
    """A row-major result; where something may be wrong with the arguments, the meta kernel says it."""
    transposed, groups = args[3], args[5]
    if weight.shape and weight.shape[0] < groups:  # the meta kernel says nothing
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, "
            f"but got weight of size {list(weight.shape)} instead"
        )
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if (
        len(x.shape) == len(weight.shape) >= 3
        and x.shape[1] == channels
        and len({(t.dtype, t.device) for t in (x, weight, bias or x)}) == 1
        and weight.shape[0] % groups == 0
        and 0 not in x.shape + weight.shape
    ):
        shape = shapes_of(aten.convolution.default, x, weight, bias, *args)
        if all(n > 0 for n in shape) and (bias is None or bias.shape == shape[1:2]):
            return TensorSpec.dense(shape, x.dtype, x.device)
    return infer_by_meta_kernel(aten.convolution.default, (x, weight, bias, *args), {})


@layout(aten.convolution.default)
def _convolution_layout(
    x: TensorSpec,
    weight: TensorSpec,
    bias: TensorSpec | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> TensorSpec:
    """PyTorch says which kernel it would take and which memory format that kernel works in."""
    out = _convolved(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if 0 in out.shape:
        return out
    inputs = x.empty(), weight.empty()  # PyTorch looks at the metadata only
    backend = compat.select_conv_backend(
        *inputs,
        None if bias is None else bias.empty(),
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
    )
    if len(out.shape) == 3:  # one row of an image; the input is made row-major first, the weight is not
        row_major = inputs[0] if x.is_contiguous else TensorSpec.dense(x.shape, x.dtype, x.device).empty()
        layout = compat.conv_memory_format(row_major.unsqueeze(2), inputs[1].unsqueeze(2), backend)
        shape = (*out.shape[:2], 1, out.shape[2])
        stride4 = (channels_last_stride if layout is torch.channels_last else contiguous_stride)(shape)
        return out.with_stride(stride4[:2] + stride4[3:])
    layout = compat.conv_memory_format(*inputs, backend)
    if layout in (torch.channels_last, torch.channels_last_3d):
        return out.with_stride(channels_last_stride(out.shape))
    return TensorSpec.dense(out.shape, out.dtype, out.device)


def _refuse_padded_channels(x: Axes, w: Axes) -> None:
    CannotPad.when(is_padded(*w) or is_padded(x[1]), "a convolution of padded channels")


@padding(aten.convolution.default)
def _convolution_padding(call: Call) -> Padded:
    """Beyond an image a convolution sees zeros, and one that is transposed makes nothing of zeros."""
    x = call.axes(0)
    _refuse_padded_channels(x, call.axes(1))
    call.mask(0, range(2, len(x)))
    return call.emit((x[0], axis_of(call.shape[1]), *map(row_of, call.shape[2:])))


# Backward ---------------------------------------------------------------------------------------------------


@layout(
    aten.convolution_backward.default,
    shape=lambda grad, x, weight, bias, *args: [x.shape, weight.shape, grad.shape[1:2]],
)
def _convolution_backward_layout(
    grad: TensorSpec, x: TensorSpec, weight: TensorSpec, bias: Sequence[int] | None, *args: Any
) -> tuple[TensorSpec | None, ...]:
    """Both gradients are channels-last if the input or the weight is.

    Where oneDNN has no kernels of halves for the processor, PyTorch's own lay a weight's gradient out row by
    row if sizes of 1 leave open which format it is in.
    """
    last = suggests_channels_last(x) or suggests_channels_last(weight)
    dx, dw = (
        spec.with_stride(channels_last_stride(spec.shape)) if last else spec
        for spec in (dense(x.shape, grad), dense(weight.shape, grad))
    )
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(grad.dtype)
    if half and dw.is_contiguous and not getattr(torch.ops.mkldnn, f"_is_mkldnn_{half}_supported")():
        dw = dense(dw.shape, dw)
    wanted = args[-1]
    return (
        dx if wanted[0] else None,
        dw if wanted[1] else None,
        dense(bias, grad) if wanted[2] and bias is not None else None,
    )


@padding(aten.convolution_backward.default)
def _convolution_backward_padding(call: Call) -> Padded:
    """Gradients of padding are zeros, and so is the padding of their factors."""
    gradient, x, w = (call.axes(place) for place in range(3))
    _refuse_padded_channels(x, w)
    for place, axes in ((0, gradient), (1, x)):
        call.mask(place, [0, *range(2, len(axes))])
    return call.emit((x, w, (gradient[1],)))
