"""Shape rules of our own: ops whose meta kernel gives other strides than the CPU kernel does.

Pointwise ops need no row: `shapes.py` gives every op that carries the pointwise tag TensorIterator's strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from .layout import preserved_stride, suggested_stride
from .shapes import PASS, ShapeRule, infer_by_meta_kernel, shape_rule, shape_rules
from .spec import TensorSpec, channels_last_stride, contiguous_stride

aten = torch.ops.aten


def _untouched(spec: TensorSpec | None) -> torch.Tensor | None:
    """A real tensor of this metadata whose memory is never touched, to ask PyTorch what it would do."""
    if spec is None:
        return None
    return torch.empty(spec.extent, dtype=spec.dtype, device=spec.device).as_strided(spec.shape, spec.stride)


@shape_rule(aten.convolution.default)
def _convolution(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, stride: Any, padding: Any, dilation: Any,
                 transposed: bool, output_padding: Any, groups: int) -> TensorSpec:
    """PyTorch says which kernel it would take and which memory format that kernel works in."""
    out = infer_by_meta_kernel(aten.convolution.default, (x, weight, bias, stride, padding, dilation, transposed, output_padding,
                                                           groups), {})
    if 0 in out.shape or len(out.shape) not in (4, 5):
        return out
    inputs = _untouched(x), _untouched(weight)
    backend = torch._C._select_conv_backend(*inputs, _untouched(bias), stride, padding, dilation, transposed, output_padding,
                                            groups)
    layout = torch._C._conv_determine_backend_memory_format(*inputs, backend)
    if layout in (torch.channels_last, torch.channels_last_3d):
        return out.with_stride(channels_last_stride(out.shape))
    return TensorSpec.dense(out.shape, out.dtype, out.device)


def _in_format_of_input(func: OpOverload) -> ShapeRule:
    """The (first) result takes the memory format that the argument `x` suggests, channels-last or row-major."""
    position = 1 if func is aten.native_batch_norm_backward.default else 0

    def rule(*args: Any, **kwargs: Any) -> Any:
        out = infer_by_meta_kernel(func, args, kwargs)
        if type(out) is tuple:
            first = out[0]
            return out if first is None else (first.with_stride(suggested_stride(args[position], first.shape)), *out[1:])
        return out.with_stride(suggested_stride(args[position], out.shape))

    return rule


for _func in (aten.native_batch_norm.default, aten._native_batch_norm_legit_functional.default, aten.pixel_shuffle.default,
              aten._native_batch_norm_legit.no_stats, aten.native_batch_norm_backward.default, aten.pixel_unshuffle.default,
              aten.reflection_pad2d.default, aten.replication_pad2d.default):
    shape_rules.add(_func, _in_format_of_input(_func))


@shape_rule(aten.clone.default, aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
            aten._to_copy.default, aten.rand_like.default, aten.randn_like.default)
def _like(x: TensorSpec, value: Any = None, *, memory_format: torch.memory_format | None = None, **options: Any) -> Any:
    """Copies and `*_like` factories keep the order of dimensions when no memory format is asked for."""
    if memory_format not in (None, torch.preserve_format):
        stride = {torch.channels_last: channels_last_stride, torch.channels_last_3d: channels_last_stride,
                  torch.contiguous_format: contiguous_stride}[memory_format](x.shape)
    else:
        stride = preserved_stride(x)
    return TensorSpec(x.shape, stride, options.get("dtype") or x.dtype, torch.device(options.get("device") or x.device))


@shape_rule(aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default,
            aten.fractional_max_pool3d_backward.default)
def _gradient_of_second(grad: TensorSpec, x: TensorSpec, *rest: Any, **kwargs: Any) -> TensorSpec:
    """Backwards without a meta kernel, whose gradient is a new row-major tensor of the input's shape."""
    return TensorSpec.dense(x.shape, x.dtype, x.device)


@shape_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(x: TensorSpec, mask: TensorSpec, value: Any) -> TensorSpec:
    """Eager fills a row-major copy."""
    return TensorSpec.dense(torch.broadcast_shapes(x.shape, mask.shape), x.dtype, x.device)


@shape_rule(aten.roll.default)
def _roll(x: TensorSpec, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Eager concatenates two slices along each dimension, and that keeps channels-last."""
    if x.numel == 0 or not dims:
        return PASS
    return TensorSpec(x.shape, suggested_stride(x, x.shape), x.dtype, x.device)


@shape_rule(aten._grouped_mm.default)
def _grouped_mm(x: TensorSpec, weight: TensorSpec, offs: TensorSpec | None = None, bias: TensorSpec | None = None,
                out_dtype: torch.dtype | None = None) -> TensorSpec:
    """Rows of the result start at multiples of 16 bytes."""
    dtype = out_dtype or x.dtype
    shape = (x.shape[-2], weight.shape[-1])
    if len(x.shape) == len(weight.shape):
        shape = (x.shape[0] if len(x.shape) == 3 else offs.shape[0] if offs is not None else 0, *shape)
    step = 16 // dtype.itemsize
    row = -(-shape[-1] // step) * step
    return TensorSpec(shape, (shape[-2] * row, row, 1)[-len(shape):], dtype, x.device)
