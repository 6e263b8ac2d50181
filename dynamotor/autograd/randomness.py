"""Random ops: draws of the counter-based generator from one seed a graph, or eager's own ops under
`fallback_random`.

>>> # F.dropout(x, 0.1) records: u = dynamotor.rand(seed, 0, x.shape); mask = ~(u < 0.1); ...
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..base.compat import OpOverload
from ..base.config import config
from ..graph import prims  # noqa: F401  (it defines torch.ops.dynamotor)
from ..graph.shape_tensor import ShapeTensor
from ..graph.spec import aten, device_with_index
from .aten_recorder import GraphRecorder, record_rule

_WIDE = (torch.float32, torch.float64)
_BITS = 24  # of a number of one stream
_SHOWS = 1e-3  # 24 bits are 6e-5 of it


def uniform(recorder: GraphRecorder, shape: Any, device: torch.device) -> ShapeTensor:
    """float32 in [0, 1) of the next stream of the graph's seed on that device."""
    seed = recorder.seeds.get(device)
    if seed is None:
        where = {} if device.type == "cpu" else {"device": device}
        seed = recorder.seeds[device] = recorder.call(torch.ops.dynamotor.new_seed.default, **where)
    stream = recorder.streams
    recorder.streams += 1
    return recorder.call(
        torch.ops.dynamotor.rand.default, seed, stream, list(shape), dtype=torch.float32, device=device
    )


def _uniform_of(recorder: GraphRecorder, shape: Any, device: torch.device, dtype: torch.dtype) -> ShapeTensor:
    """Uniform in [0, 1), with all digits of the type: a float64 joins 24, 24 and 5 bits of three streams."""
    high = uniform(recorder, shape, device)
    if dtype is torch.float32:
        return high
    call, mul = recorder.call, aten.mul.Scalar
    middle, low = uniform(recorder, shape, device), uniform(recorder, shape, device)
    high, middle = (call(aten._to_copy.default, part, dtype=dtype) for part in (high, middle))
    low = call(aten._to_copy.default, call(aten.floor.default, call(mul, low, 32)), dtype=dtype)
    drawn = call(aten.add.Tensor, high, call(mul, middle, 2.0**-_BITS))
    return call(aten.add.Tensor, drawn, call(mul, low, 2.0**-53))


def _is_below(recorder: GraphRecorder, shape: Any, device: torch.device, p: float) -> ShapeTensor:
    """True with probability p. A stream has 24 bits: if rounding p to them would show (near 0 and 1), numbers
    equal to p's first 24 bits are followed by a comparison of p's next bits with another stream.
    """
    drawn = uniform(recorder, shape, device)
    whole = math.floor(math.ldexp(p, _BITS))
    rest = math.ldexp(p, _BITS) - whole
    if rest == 0 or p <= 0 or p >= 1 or min(p, 1 - p) > _SHOWS:
        return recorder.call(aten.lt.Scalar, drawn, p)
    border = math.ldexp(whole, -_BITS)
    below = recorder.call(aten.lt.Scalar, drawn, border)
    on_it = recorder.call(aten.eq.Scalar, drawn, border)
    further = recorder.call(aten.logical_and.default, on_it, _is_below(recorder, shape, device, rest))
    return recorder.call(aten.logical_or.default, below, further)


def _ours(generator: Any, device: torch.device | None) -> bool:
    return (
        not config.fallback_random
        and generator is None
        and (device is None or torch.device(device).type in ("cpu", "cuda"))
    )


@record_rule(aten.bernoulli_.float, aten.bernoulli.p)
def _bernoulli(
    recorder: GraphRecorder, func: OpOverload, source: ShapeTensor, p: float = 0.5, *, generator: Any = None
) -> Any:
    if not _ours(generator, source.device):
        return (
            NotImplemented
            if func is aten.bernoulli.p or source.is_contiguous()
            else _in_memory_order(recorder, source, p)
        )
    drawn = _is_below(recorder, source.shape, source.device, p)
    value = recorder.call(aten._to_copy.default, drawn, dtype=source.dtype)
    if func is aten.bernoulli.p:
        return value
    recorder.assign(source, value)
    return source


def _in_memory_order(recorder: GraphRecorder, target: ShapeTensor, p: float) -> ShapeTensor:
    """Eager's in-place draw goes through memory in its order; the functional op goes through indices."""
    strides = target.stride()
    order = sorted(range(target.dim()), key=lambda d: -strides[d])
    zeros = recorder.call(
        aten.full.default, [target.shape[d] for d in order], 0, dtype=target.dtype, device=target.device
    )
    drawn = recorder.plain(aten.bernoulli.p, (zeros, p), {})
    recorder.assign(
        target, recorder.call(aten.permute.default, drawn, [order.index(d) for d in range(target.dim())])
    )
    return target


@record_rule(aten.native_dropout.default)
def _native_dropout(
    recorder: GraphRecorder, func: OpOverload, source: ShapeTensor, p: float, train: bool | None
) -> Any:
    if not _ours(None, source.device) or train is False or p in (0, 1):
        return NotImplemented
    mask = recorder.call(aten.logical_not.default, _is_below(recorder, source.shape, source.device, p))
    kept = recorder.call(aten.mul.Tensor, source, mask)
    return recorder.call(aten.mul.Tensor, kept, 1.0 / (1.0 - p)), mask


@record_rule(aten.rand.default)
def _rand(
    recorder: GraphRecorder,
    func: OpOverload,
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    dtype = dtype or torch.get_default_dtype()
    if not _ours(None, device) or dtype not in _WIDE:
        return NotImplemented
    return _uniform_of(recorder, size, device_with_index(device or "cpu"), dtype)


@record_rule(aten.rand_like.default)
def _rand_like(
    recorder: GraphRecorder,
    func: OpOverload,
    source: ShapeTensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    if not source.is_contiguous():
        return NotImplemented
    return _rand(recorder, func, source.shape, dtype=dtype or source.dtype, device=device or source.device)


@record_rule(aten.uniform_.default)
def _uniform(
    recorder: GraphRecorder,
    func: OpOverload,
    target: ShapeTensor,
    low: float = 0.0,
    high: float = 1.0,
    *,
    generator: Any = None,
) -> Any:
    if not _ours(generator, target.device) or target.dtype not in _WIDE:
        return NotImplemented
    drawn = _uniform_of(recorder, target.shape, target.device, target.dtype)
    drawn = recorder.call(aten.mul.Scalar, drawn, high - low)
    recorder.assign(target, recorder.call(aten.add.Scalar, drawn, low))
    return target
