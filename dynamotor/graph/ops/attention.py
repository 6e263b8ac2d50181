"""Scaled dot-product attention: the kernels of CPUs and GPUs, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..bucket_padding import (
    Axes,
    Call,
    CannotPad,
    Padded,
    broadcast_axes,
    is_padded,
)
from ..layouts import dense_as
from ..op_definition import (
    Shape,
    define,
    layout,
    padding,
    require,
    require_fits,
    shape,
)
from ..result_strides import (
    dense_in_order,
    preserved_stride,
)
from ..spec import TensorSpec, aten, contiguous_stride


def _require_same_heads(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> None:
    require(
        all(a == b for a, b in zip(q.shape[:2], k.shape[:2]))
        and all(a == b for a, b in zip(k.shape[:3], v.shape[:3]))
    )


def _require_attends(q: TensorSpec, k: TensorSpec, attn_mask: Any) -> None:
    require(q.shape[-1] == k.shape[-1])
    if type(attn_mask) is TensorSpec:
        require_fits(attn_mask.shape, (*q.shape[:3], k.shape[2]))


# The CPU's kernel -------------------------------------------------------------------------------------------


@shape(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    requires=lambda q, k, v, *args, attn_mask=None, **kwargs: _require_attends(q, k, attn_mask),
)
def _cpu_attention_shape(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, *args: Any, **kwargs: Any
) -> list[Shape]:
    _require_same_heads(q, k, v)
    return [q.shape, (q.shape[0], q.shape[1], q.shape[2])]


@layout(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _cpu_attention_layout(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, *args: Any, **kwargs: Any
) -> tuple[TensorSpec, TensorSpec]:
    """The result is laid out as the query, the logarithms of sums with heads innermost."""
    batch, heads, length, _ = q.shape
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    sums = TensorSpec((batch, heads, length), (length * heads, 1, heads), wide, q.device)
    return TensorSpec(q.shape, preserved_stride(q), q.dtype, q.device), sums


# The layer of nn.TransformerEncoder without gradients: row-major, whatever the input's layout.
define(aten._transformer_encoder_layer_fwd.default, layout=dense_as(0))


# Gradients have the order batch, position, head, channel.
define(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    layout=lambda grad, *inputs, **kwargs: tuple(
        [TensorSpec(x.shape, dense_in_order([3, 1, 2, 0], x.shape), x.dtype, x.device) for x in inputs[:3]]
    ),
)


def _no_dropout(call: Call, place: int) -> None:
    dropout = call.args[place] if len(call.args) > place else call.kwargs.get("dropout_p", 0.0)
    CannotPad.when(dropout, "attention with dropout")


def _mask_keys(call: Call, places: tuple[int, int], q: Axes, k: Axes, causal: int) -> None:
    """No query attends padding: true where each sees only earlier positions."""
    for place in places:
        call.mask(place, [2])
    axis = k[2]
    is_causal = call.args[causal] if len(call.args) > causal else call.kwargs.get("is_causal", False)
    if not is_padded(axis) or is_causal and q[2] == axis:
        return
    CannotPad.when(is_causal, "causal attention to other positions")
    writer, dtype = call.writer, call.args[places[0]].meta["val"].dtype
    rows, keys = (call.args[place].meta["val"].shape[2] for place in (places[0] - 1, places[0]))
    given = call.kwargs.get("attn_mask")
    if given is None:
        given = writer.full([1, 1, rows, keys], 0.0, dtype)
    least = writer.full([], -math.inf, dtype)
    found = writer.op(aten.where.self, writer.along(writer.valid(axis), 3, 4), given, least)
    call.kwargs["attn_mask"] = call.keep(found, ())


@padding(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _cpu_attention_padding(call: Call) -> Padded:
    q, k, v = (call.axes(i) for i in range(3))
    _no_dropout(call, 3)
    lead = broadcast_axes([q[:2], k[:2], v[:2]])
    _mask_keys(call, (1, 2), q, k, 4)
    return call.emit(((*lead, q[2], v[3]), (*lead, q[2])))


@padding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _cpu_attention_backward_padding(call: Call) -> Padded:
    q, k, v = (call.axes(i) for i in (1, 2, 3))
    _no_dropout(call, 6)
    for place in (0, 1, 4, 5):  # rows of padding give no gradient
        call.mask(place, [2])
    _mask_keys(call, (2, 3), q, k, 7)
    return call.emit((q, k, v))


# Kernels of GPUs --------------------------------------------------------------------------------------------


@shape(aten._scaled_dot_product_efficient_attention.default)
def _efficient_attention_shape(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    bias: TensorSpec | None,
    sums: bool,
    *args: Any,
    **kwargs: Any,
) -> list[Shape]:
    """The logarithms of sums have room for a multiple of 32 positions; then two random seeds."""
    _require_same_heads(q, k, v)
    length = (q.shape[2] + 31) // 32 * 32 if sums else 0
    return [(*q.shape[:3], v.shape[3]), (*q.shape[:2], length), (), ()]


@shape(
    aten._scaled_dot_product_flash_attention.default,
    requires=lambda q, k, v, *args, **kwargs: _require_attends(q, k, None),
)
def _flash_attention_shape(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, *args: Any, **kwargs: Any
) -> list[Any]:
    """Result, logarithms of sums, the lengths, two seeds, and what debugging would show."""
    _require_same_heads(q, k, v)
    return [q.shape, q.shape[:3], None, None, q.shape[2], k.shape[2], (2,), (), (0,)]


@shape(aten._scaled_dot_product_cudnn_attention.default)
def _cudnn_attention_shape(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, *args: Any, **kwargs: Any
) -> list[Any]:
    """As flash attention gives them, without what debugging would show; two seeds of one number."""
    _require_same_heads(q, k, v)
    lengths = (q.shape[2], k.shape[2])
    return [(*q.shape[:3], v.shape[3]), (*q.shape[:3], 1), None, None, *lengths, (), (), None]


define(
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    requires=lambda q, k, v, bias, *args, **kwargs: _require_attends(q, k, bias),
)


def _in_steps(x: TensorSpec, step: int) -> TensorSpec:
    """As a new tensor whose rows start at multiples of so many elements."""
    row = (x.shape[-1] + step - 1) // step * step
    return TensorSpec(x.shape, contiguous_stride((*x.shape[:-1], row)), x.dtype, x.device)


define(
    aten._scaled_dot_product_efficient_attention_backward.default,
    shape=lambda grad, q, k, v, bias, *args, **kwargs: (
        [q.shape, k.shape, v.shape, _in_steps(bias, 16) if type(bias) is TensorSpec else ()]
    ),
)
define(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    shape=lambda grad, q, k, v, *args, **kwargs: [q.shape, k.shape, v.shape],
)
