"""New tensors and copies."""

from __future__ import annotations

from typing import Any

import torch

from ..bucket_padding import (
    Call,
    CannotPad,
    Padded,
    Run,
    axis_of,
    broadcast_axes,
    settle,
)
from ..kernel_checks import (
    ask_fill,
)
from ..nodes import overload
from ..op_definition import (
    PASS,
    Shape,
    Unknown,
    check,
    define,
    layout,
    padding,
    question,
    require,
    shape,
    shape_of_argument,
)
from ..result_strides import (
    preserved_stride,
)
from ..shapes import (
    device_of_result,
)
from ..sizes import Size
from ..spec import TensorSpec, aten, channels_last_stride, contiguous_stride, device_with_index

define(
    aten.full.default,
    aten.empty.memory_format,
    aten.zeros.default,
    aten.ones.default,
    aten.rand.default,
    aten.randn.default,
    shape=lambda size, *args, **kwargs: tuple(size),
)
define(
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_full.default,
    aten.new_ones.default,
    shape=lambda x, size, *args, **kwargs: tuple(size),
)


@padding(
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
def _filled_padding(call: Call) -> Padded:
    name = overload(call.node)._schema.name
    fill = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2}.get(name)
    CannotPad.when(fill in call.symbolic, f"{call.node.target} of a size")
    return call.emit(call.axes(0)) if name.endswith("_like") else call.emit(tuple(map(axis_of, call.shape)))


check("full", "full_like", "new_full", "fill", "fill_", "scalar_tensor")(ask_fill)


@shape(aten.arange.start, aten.arange.start_step)
def _arange_shape(start: Any, end: Any, step: Any = 1, **kwargs: Any) -> Shape:
    if any(isinstance(v, float) for v in (start, end, step)):
        raise Unknown
    return (-((start - end) // step),)


define(aten.arange.default, shape=lambda end, **kwargs: _arange_shape(0, end))


@layout(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange_layout(*args: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    start, end, step = (0, *args, 1)[-3:] if len(args) == 1 else (*args, 1)[:3]
    whole = all(type(n) is int for n in (start, end, step))
    if (
        not whole
        or dtype not in (None, torch.int64)
        or options.get("layout")
        or step * (end - start) < 0
        or not step
    ):
        return PASS
    return TensorSpec.dense(_arange_shape(start, end, step), torch.int64, device_of_result((), options))


@padding(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange_padding(call: Call) -> Padded:
    CannotPad.when(
        call.node.target is not aten.arange.default and 0 in call.symbolic or 2 in call.symbolic,
        "a range that begins at a size",
    )
    size = settle(call.shape[0])
    return call.emit(((Run(size),) if type(size) is Size else axis_of(size),))


@shape(aten.eye.default, aten.eye.m)
def _eye_shape(n: Any, m: Any = None, **options: Any) -> Shape:
    shape = (n, n if m is None else m)
    require(all(size >= 0 for size in shape))
    return shape


@layout(aten.eye.default, aten.eye.m)
def _eye_layout(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    shape = (n, n if m is None else m)
    if any(type(size) is not int or size < 0 for size in shape) or options.get("layout"):
        return PASS
    return TensorSpec.dense(shape, dtype or torch.get_default_dtype(), device_of_result((), options))


# Copies -----------------------------------------------------------------------------------------------------


@layout(
    aten.clone.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten._to_copy.default,
    aten.rand_like.default,
    aten.randn_like.default,
)
def like_layout(
    x: TensorSpec, value: Any = None, *, memory_format: torch.memory_format | None = None, **options: Any
) -> Any:
    """Copies and `*_like` factories keep the order of dimensions when no memory format is asked for."""
    if memory_format not in (None, torch.preserve_format):
        stride = {
            torch.channels_last: channels_last_stride,
            torch.channels_last_3d: channels_last_stride,
            torch.contiguous_format: contiguous_stride,
        }[memory_format](x.shape)
    else:
        stride = preserved_stride(x)
    return TensorSpec(
        x.shape, stride, options.get("dtype") or x.dtype, device_with_index(options.get("device") or x.device)
    )


@padding(
    aten.clone.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
)
def _copy_padding(call: Call) -> Padded:
    return call.emit(call.axes(0))


@padding(aten.copy.default, shape=shape_of_argument(0))
def _written_padding(call: Call) -> Padded:
    CannotPad.when(
        broadcast_axes([call.axes(0), call.axes(1)]) != call.axes(0),
        "a write of values padded at other places",
    )
    return call.emit(call.axes(0))


question("_to_copy", "copy_")(None)  # not worth asking
