"""Pools, and images as rows of windows, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...base.compat import OpOverload
from ..bucket_padding import (
    Call,
    CannotPad,
    Padded,
    broadcast_axes,
    is_padded,
    row_of,
)
from ..layouts import (
    as_argument,
    dense,
    dense_as,
    with_stride,
)
from ..op_definition import (
    PASS,
    Shape,
    define,
    layout,
    padding,
    require,
    require_equal,
    require_numbers,
    shape,
    shape_of_argument,
    shapes_of,
)
from ..result_strides import (
    suggested_stride,
    suggests_channels_last,
)
from ..shapes import (
    infer_spec,
)
from ..sizes import equal
from ..spec import TensorSpec, aten


@shape(aten.max_pool2d_with_indices.default)
def _pool_shape(
    x: TensorSpec,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> Shape:
    kernel, padding, dilation = ([*v] * 2 if len(v) == 1 else [*v] for v in (kernel, padding, dilation))
    stride = kernel if not stride else [*stride] * 2 if len(stride) == 1 else [*stride]
    sizes = []
    for n, k, s, p, d in zip(x.shape[-2:], kernel, stride, padding, dilation):
        last = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil else 0)) // s
        beyond = ceil and p + s - 2 >= d * (k - 1) and last * s >= n + p  # it would begin behind the image
        sizes.append(last if beyond else last + 1)
    return (*x.shape[:-2], *sizes)


define(
    aten.avg_pool2d.default,
    shape=lambda x, kernel, stride=(), padding=(0,), ceil=False, *args: _pool_shape(
        x, kernel, stride, padding, (1,), ceil
    ),
)


def _pooled(
    x: TensorSpec,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> TensorSpec | None:
    """Pooled images in the memory format that the images suggest; None where something may be wrong with the
    arguments.
    """
    numbers = (*kernel, *stride, *dilation)
    if (
        len(x.shape) not in (3, 4)
        or 0 in x.shape
        or not x.dtype.is_floating_point
        or not all(type(n) is int and n > 0 for n in numbers)
        or not all(0 <= 2 * p <= k for p, k in zip([*padding] * 2, [*kernel] * 2))
    ):
        return None
    shape: Any = shapes_of(aten.max_pool2d_with_indices.default, x, kernel, stride, padding, dilation, ceil)
    return TensorSpec(shape, suggested_stride(x, shape), x.dtype, x.device) if min(shape) > 0 else None


@layout(aten.max_pool2d_with_indices.default)
def _max_pool_layout(
    x: TensorSpec,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> Any:
    out = _pooled(x, kernel, stride, padding, dilation, ceil)
    return PASS if out is None else (out, replace(out, dtype=torch.int64))


@layout(aten.avg_pool2d.default)
def _avg_pool_layout(
    x: TensorSpec,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil: bool = False,
    counts_padding: bool = True,
    divisor: int | None = None,
) -> Any:
    out = _pooled(x, kernel, stride, padding, (1,), ceil) if divisor is None else None
    return PASS if out is None else out


define(aten.max_unpool2d.default, layout=with_stride(as_argument(0)))


def _pool_backward(func: OpOverload, grad: TensorSpec, x: TensorSpec, *args: Any) -> Any:
    pooled = infer_spec(func, (x, *[a for a in args if type(a) is not TensorSpec]), {})
    pooled = pooled[0] if type(pooled) is tuple else pooled
    if not equal(grad.shape, pooled.shape) or grad.dtype is not x.dtype:
        return PASS
    return dense(x.shape, x).with_stride(suggested_stride(x, x.shape))


define(
    aten.max_pool2d_with_indices_backward.default,
    shape=shape_of_argument(1),
    layout=functools.partial(_pool_backward, aten.max_pool2d_with_indices.default),
)
define(
    aten.avg_pool2d_backward.default,
    shape=shape_of_argument(1),
    layout=functools.partial(_pool_backward, aten.avg_pool2d.default),
)


@layout(aten._adaptive_avg_pool2d.default, shape=lambda x, size: (*x.shape[:-2], *size))
def _adaptive_pool_layout(x: TensorSpec, size: Sequence[int]) -> Any:
    if len(x.shape) not in (3, 4) or 0 in x.shape or len(size) != 2 or min(size) < 1:
        return PASS
    shape = (*x.shape[:-2], *size)
    return TensorSpec(shape, suggested_stride(x, shape), x.dtype, x.device)


@layout(aten._adaptive_avg_pool2d_backward.default, shape=shape_of_argument(1))
def _adaptive_pool_backward_layout(grad: TensorSpec, x: TensorSpec) -> Any:
    plain = is_plain_image(x) and len(grad.shape) == 4 and equal(grad.shape[:2], x.shape[:2])
    return dense(x.shape, x) if plain and grad.dtype is x.dtype and 0 not in grad.shape else PASS


def is_plain_image(x: TensorSpec) -> bool:
    return len(x.shape) == 4 and x.is_contiguous and not suggests_channels_last(x) and 0 not in x.shape


@padding(
    aten.avg_pool2d.default,
    aten.max_pool2d_with_indices.default,
    aten._adaptive_avg_pool2d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_bilinear2d.default,
    aten.avg_pool2d_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
)
def planes_padding(call: Call) -> Padded:
    """Each image by itself."""
    tensors = [call.writer.axes[a] for a in call.args if isinstance(a, fx.Node)]
    CannotPad.when(any(is_padded(*axes[-2:]) for axes in tensors), f"{call.node.target} of padded images")
    lead = broadcast_axes([axes[:-2] for axes in tensors])
    val = call.node.meta["val"]
    found = [(*lead, *map(row_of, spec.shape[-2:])) for spec in (val if isinstance(val, tuple) else (val,))]
    return call.emit(tuple(found) if isinstance(val, tuple) else found[0])


define(aten.fractional_max_pool3d_backward.default, layout=dense_as(1))  # without a meta kernel
# PyTorch's shape functions do not check sizes.
define(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default, requires=require_numbers)
# Windows ----------------------------------------------------------------------------------------------------


@shape(
    aten.im2col.default,
    requires=lambda *args: require(all(n >= 1 for n in shapes_of(aten.im2col.default, *args))),
)
def _im2col_shape(
    x: TensorSpec,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Shape:
    rows, columns = _pool_shape(x, kernel, stride, padding, dilation)[-2:]
    return (*x.shape[:-3], x.shape[-3] * kernel[0] * kernel[1], rows * columns)


define(
    aten.col2im.default,
    shape=lambda x, size, kernel, *args: (*x.shape[:-2], x.shape[-2] // (kernel[0] * kernel[1]), *size),
    requires=lambda x, size, *args: require_equal(
        _im2col_shape(replace(x, shape=(*shapes_of(aten.col2im.default, x, size, *args),)), *args), x.shape
    ),
)
