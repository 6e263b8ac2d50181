"""Decompositions: composite aten ops that lowering wants as smaller ones. One row each.

A row is called as `rule(recorder, func, *args, **kwargs)` with ShapeTensors, writes ops with `recorder.call`,
and may return NotImplemented to keep the op whole.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..base.compat import OpOverload
from ..base.config import config
from ..base.registry import register_all
from ..graph.shape_tensor import ShapeTensor
from ..graph.sizes import contiguous_stride, equal
from ..graph.spec import CPU, aten, numel
from ..graph.sym_int import from_torch
from .aten_recorder import GraphRecorder, record_rule
from .simplify import NO_MEMORY

decomposition = record_rule


def _zeros(recorder: GraphRecorder, size: Any, like: ShapeTensor) -> ShapeTensor:
    return recorder.call(aten.full.default, list(size), 0, dtype=like.dtype, device=like.device)


register_all(
    decomposition,
    (
        (
            (aten.select_backward.default,),
            lambda recorder, func, grad, sizes, dim, index: recorder.call(
                aten.select_scatter.default, _zeros(recorder, sizes, grad), grad, dim, index
            ),
        ),
        (
            (aten.slice_backward.default,),
            lambda recorder, func, grad, sizes, dim, start, end, step: recorder.call(
                aten.slice_scatter.default, _zeros(recorder, sizes, grad), grad, dim, start, end, step
            ),
        ),
        (
            (aten._native_batch_norm_legit.default,),
            lambda recorder, func, *args: recorder.record(aten.native_batch_norm.default, args, {}),
        ),
        (
            (aten.cudnn_batch_norm_backward.default,),
            lambda recorder, func, x, grad, weight, running_mean, running_var, mean, rstd, eps, reserve: (
                recorder.record(
                    aten.native_batch_norm_backward.default,
                    (grad, x, weight, None, None, mean, rstd, True, eps, [True, True, True]),
                    {},
                )
            ),
        ),
        (
            (aten.new_zeros.default,),
            lambda recorder, func, like, size, *, dtype=None, layout=None, device=None, pin_memory=None: (
                recorder.call(
                    aten.full.default, list(size), 0, dtype=dtype or like.dtype, device=device or like.device
                )
            ),
        ),
    ),
)


@decomposition(aten.native_batch_norm.default)
def _native_batch_norm(
    recorder: GraphRecorder,
    func: OpOverload,
    x: ShapeTensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """In training the running statistics are written: the functional form returns their new values."""
    if not training or running_mean is None or running_var is None:
        return recorder.plain(func, (x, weight, bias, running_mean, running_var, training, momentum, eps), {})
    out, mean, rstd, new_mean, new_var = recorder.call(
        aten._native_batch_norm_legit_functional.default,
        x,
        weight,
        bias,
        running_mean,
        running_var,
        True,
        momentum,
        eps,
    )
    for statistic, new in ((running_mean, new_mean), (running_var, new_var)):
        recorder.assign(statistic, new)
        statistic.note.memory.uncounted += 1
    return out, mean, rstd


@decomposition(aten.cudnn_batch_norm.default)
def _cudnn_batch_norm(
    recorder: GraphRecorder,
    func: OpOverload,
    x: ShapeTensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """cuDNN's is the same function, with a fourth result that only its own backward reads."""
    out, mean, rstd = recorder.record(
        aten.native_batch_norm.default,
        (x, weight, bias, running_mean, running_var, training, momentum, eps),
        {},
    )
    return out, mean, rstd, recorder.call(aten.full.default, [0], 0, dtype=torch.uint8, device=x.device)


@decomposition(aten.native_batch_norm_backward.default)
def _native_batch_norm_backward(
    recorder: GraphRecorder,
    func: OpOverload,
    grad: ShapeTensor,
    x: ShapeTensor,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    rstd: Any,
    train: bool,
    eps: float,
    mask: Any,
) -> Any:
    """In training the running statistics are not read, in evaluation the saved ones are not: what is left out
    is not kept.
    """
    statistics = (None, None, mean, rstd) if train else (running_mean, running_var, None, None)
    return recorder.plain(func, (grad, x, weight, *statistics, train, eps, mask), {})


@decomposition(aten._log_softmax.default)
def _log_softmax(
    recorder: GraphRecorder, func: OpOverload, x: ShapeTensor, dim: int, half_to_float: bool
) -> Any:
    """On a GPU in steps: the backward then saves two numbers a row and the rows' operands, not
    the result.
    """
    if (
        (x.device.type != "cuda" and config.target != "triton")
        or not x.numel()
        or not x.dim()
        or not x.is_contiguous()
    ):
        return NotImplemented
    result = torch.float32 if half_to_float else x.dtype
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    y = x if x.dtype is wide else recorder.call(aten._to_copy.default, x, dtype=wide)
    shifted = recorder.call(aten.sub.Tensor, y, recorder.call(aten.amax.default, y, [dim], True))
    total = recorder.call(aten.sum.dim_IntList, recorder.call(aten.exp.default, shifted), [dim], True)
    out = recorder.call(aten.sub.Tensor, shifted, recorder.call(aten.log.default, total))
    return out if result is wide else recorder.call(aten._to_copy.default, out, dtype=result)


def _over_broadcast(recorder: GraphRecorder, x: ShapeTensor, size: Any) -> ShapeTensor:
    """The sum of x over the dimensions by which an operand of this size was broadcast to it."""
    before = x.dim() - len(size)
    wide = [d for d, n in enumerate(map(from_torch, size), before) if not equal(n, x.spec.shape[d])]
    dims = [*range(before), *wide]
    return recorder.call(aten.sum.dim_IntList, x, dims, True) if dims else x


@decomposition(aten.rrelu_with_noise.default)
def _rrelu(
    recorder: GraphRecorder,
    func: OpOverload,
    x: ShapeTensor,
    noise: ShapeTensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """Outside of training it has the middle slope, and leaves the noise alone; its result is contiguous."""
    if training:
        return NotImplemented
    result = recorder.call(aten.leaky_relu.default, x, (lower + upper) / 2)
    return recorder.call(aten.clone.default, result, memory_format=torch.contiguous_format)


@decomposition(aten.rrelu_with_noise_backward.default)
def _rrelu_backward(
    recorder: GraphRecorder,
    func: OpOverload,
    grad: ShapeTensor,
    x: ShapeTensor,
    noise: ShapeTensor,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> Any:
    if training:
        return NotImplemented
    return recorder.call(aten.leaky_relu_backward.default, grad, x, (lower + upper) / 2, self_is_result)


@decomposition(aten.zeros.default, aten.ones.default)
def _zeros_ones(
    recorder: GraphRecorder,
    func: OpOverload,
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    value = 1 if func is aten.ones.default else 0
    arrived = recorder.arrived.pop() if recorder.arrived else None
    if arrived is not None and value == 0:
        zeros = recorder.call(
            aten.full_like.default,
            arrived,
            0,
            dtype=dtype,
            device=device,
            memory_format=torch.contiguous_format,
        )
        return recorder.call(aten.view.default, _over_broadcast(recorder, zeros, size), list(size))
    return recorder.call(
        aten.full.default,
        list(size),
        value,
        dtype=dtype or torch.get_default_dtype(),
        device=torch.device(device or torch.get_default_device()),
    )


@decomposition(aten._efficientzerotensor.default)
def _without_memory(recorder: GraphRecorder, func: OpOverload, size: Any, **given: Any) -> Any:
    """Zeros that stand for what arrived at an op without slope (`sgn`), where that is known."""
    arrived = recorder.arrived.pop() if recorder.arrived else None
    if arrived is None:
        return _zeros_ones(recorder, func, size, **given)
    return recorder.plain(NO_MEMORY, (arrived,), {})


@decomposition(aten.zeros_like.default, aten.ones_like.default)
def _like(
    recorder: GraphRecorder,
    func: OpOverload,
    like: ShapeTensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    value = 0 if func is aten.zeros_like.default else 1
    arrived = recorder.arrived.pop() if recorder.arrived else None
    layout = like.spec.shape, like.spec.stride
    if arrived is not None and value == 0 and equal((arrived.spec.shape, arrived.spec.stride), layout):
        like = arrived  # of an op without slope: the zeros are there where this gradient is
    own = like.spec.stride  # a dimension of one element may have any
    plain = like.is_contiguous() and (
        memory_format is torch.contiguous_format
        or memory_format in (None, torch.preserve_format)
        and equal(own, contiguous_stride(like.spec.shape))
    )
    if not plain or recorder.is_gradient(like):
        return recorder.call(
            aten.full_like.default, like, value, dtype=dtype, device=device, memory_format=memory_format
        )
    return recorder.call(
        aten.full.default, list(like.shape), value, dtype=dtype or like.dtype, device=device or like.device
    )


@decomposition(aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
def _unsafe_split(recorder: GraphRecorder, func: OpOverload, x: ShapeTensor, sizes: Any, dim: int = 0) -> Any:
    """Slices of their source's memory that autograd does not know as views."""
    dim %= len(x.shape)
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[dim] - start) for start in range(0, x.shape[dim], max(sizes, 1))] or [0]
    ends = list(itertools.accumulate(sizes))
    return [
        recorder.call(aten.slice.Tensor, x, dim, end - size, end)
        for size, end in zip(sizes, ends, strict=True)
    ]


@decomposition(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
def _put_by_mask(
    recorder: GraphRecorder,
    func: OpOverload,
    x: ShapeTensor,
    indices: Any,
    values: ShapeTensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Any:
    """One number, written by a mask without a count of the places, for which a GPU's host would wait."""
    places = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if accumulate or len(places) != 1 or numel(values.spec.shape) != 1 or values.dim() > 1:
        return NotImplemented
    ((before, mask),) = places
    if mask.dtype is not torch.bool or not mask.dim() or values.dtype is not x.dtype or x.dtype is torch.bool:
        return NotImplemented
    shape, device = x.spec.shape[before : before + mask.dim()], mask.device
    if not equal(shape, mask.spec.shape) or device != x.device or values.device not in (device, CPU):
        return NotImplemented
    for _ in range(x.dim() - before - mask.dim()):
        mask = recorder.call(aten.unsqueeze.default, mask, -1)
    value = values if not values.dim() else recorder.call(aten.select.int, values, 0, 0)
    if func is aten.index_put.default:
        x = recorder.call(aten.clone.default, x)
    return recorder.call(aten.masked_fill_.Tensor, x, mask, value)


_FEW = 8  # tests of membership that are cheaper than a sort, and fuse


@decomposition(aten.isin.Tensor_Tensor)
def _isin(
    recorder: GraphRecorder,
    func: OpOverload,
    elements: ShapeTensor,
    tests: ShapeTensor,
    *,
    assume_unique: bool = False,
    invert: bool = False,
) -> Any:
    """Among a few values: comparisons with each, as eager's kernel does."""
    plain = all(not x.dtype.is_complex and x.dtype is not torch.bool for x in (elements, tests))
    count = numel(tests.spec.shape)
    if not plain or not isinstance(count, int) or not 0 < count <= _FEW or elements.device != tests.device:
        return NotImplemented
    values = tests if len(tests.spec.shape) == 1 else recorder.call(aten.reshape.default, tests, [count])
    found = None
    for i in range(count):
        same = recorder.call(aten.eq.Tensor, elements, recorder.call(aten.select.int, values, 0, i))
        found = same if found is None else recorder.call(aten.bitwise_or.Tensor, found, same)
    found = recorder.call(aten.logical_not.default, found) if invert else found
    return recorder.call(aten.clone.default, found, memory_format=torch.contiguous_format)  # eager's layout
