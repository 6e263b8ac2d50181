"""Lowerings of upsampling: nearest as index arithmetic, bilinear as four reads with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..base.config import config
from ..graph.sizes import Dim, is_symbolic, numbers
from ..graph.spec import aten, numel
from .index_expr import Index, Loaded
from .ir import COMPUTE_TYPE, F32, F64, I32, Expr, cast, const, index_value, op
from .lowering import LoopBuilder, decline_if, lowering
from .ops_reduce import wide
from .value import LoopValue

MAX_COPIES = 16


def _ratio(size: Dim, out: Dim, scale: float | None) -> float:
    """Eager's step in the operand for one step in the result."""
    return 1.0 / scale if scale is not None and scale > 0 else size / out


def _nearest_is_division(size: int, out: int, scale: float | None) -> bool:
    """Whether eager's positions, which it computes in float32, are `i * size // out`."""
    step = torch.tensor(_ratio(size, out, scale), dtype=torch.float32)
    eager = (torch.arange(out) * step).floor().long().clamp(max=size - 1)
    return bool((eager == torch.arange(out) * size // out).all())


def _check(x: LoopValue, sizes: Sequence[Dim], out: Sequence[Dim], scales: Sequence[float | None]) -> None:
    decline_if(is_symbolic((*sizes, *out)), "sizes that differ between calls")
    decline_if(
        not numel(x.shape) or not all(map(_nearest_is_division, numbers(sizes), numbers(out), scales)),
        "positions that are no plain division",
    )


@lowering(aten.upsample_nearest2d.default)
def _nearest(
    ctx: LoopBuilder,
    x: LoopValue,
    out: Sequence[Dim],
    scale_h: float | None = None,
    scale_w: float | None = None,
) -> LoopValue:
    (h, w), (out_h, out_w) = x.shape[-2:], out
    _check(x, (h, w), (out_h, out_w), (scale_h, scale_w))
    ctx.keep_if_heavy(x)
    return ctx.generate(lambda i: x.at((*i[:-2], i[-2] * h // out_h, i[-1] * w // out_w)))


@lowering(aten.upsample_nearest2d_backward.default)
def _nearest_backward(
    ctx: LoopBuilder,
    grad: LoopValue,
    out: Sequence[Dim],
    size: Sequence[Dim],
    scale_h: float | None = None,
    scale_w: float | None = None,
) -> LoopValue:
    """Each element was copied to a block: the sum over it."""
    (h, w), (out_h, out_w) = size[-2:], out
    _check(grad, (h, w), (out_h, out_w), (scale_h, scale_w))
    decline_if(
        out_h % h or out_w % w or out_h * out_w > MAX_COPIES * h * w, "blocks of several sizes, or large ones"
    )
    high, across = out_h // h, out_w // w
    compute, dtype = wide(grad.dtype), ctx.spec.dtype
    ctx.keep(grad)

    def body(index: tuple[Index, ...]) -> Expr:
        result = const(0, compute)
        for a in range(high):
            for b in range(across):
                place = (*index[:-2], index[-2] * high + a, index[-1] * across + b)
                result = op("add", result, cast(grad.at(place), compute))
        return cast(result, COMPUTE_TYPE[dtype])

    return ctx.generate(body)


def _two_positions(
    i: Index, size: Dim, out: Dim, aligned: bool, scale: float | None, compute: torch.dtype
) -> Any:
    """The two positions around a result, and its distance from the first."""
    if aligned:
        step = (size - 1) / (out - 1) if out > 1 else 0.0
        place = op("mul", cast(index_value(i, I32), compute), const(step, compute))
    else:
        centre = op("add", cast(index_value(i, I32), compute), const(0.5, compute))
        place = op("sub", op("mul", centre, const(_ratio(size, out, scale), compute)), const(0.5, compute))
        place = op("max", place, const(0, compute))
    low = op("min", cast(place, I32), const(size - 1, I32))
    high = op("min", op("add", low, const(1, I32)), const(size - 1, I32))
    far = op("sub", place, cast(low, compute))
    return (
        Index.of(Loaded(low, size)),
        Index.of(Loaded(high, size)),
        op("min", op("max", far, const(0, compute)), const(1, compute)),
    )


@lowering(aten.upsample_bilinear2d.default)
def _bilinear(
    ctx: LoopBuilder,
    x: LoopValue,
    out: Sequence[Dim],
    aligned: bool,
    scale_h: float | None = None,
    scale_w: float | None = None,
) -> LoopValue:
    decline_if(
        (config.aten_windows and not ctx.on_gpu) or not x.dtype.is_floating_point or not numel(x.shape),
        "bilinear upsampling on a CPU, of integers or of nothing",
    )
    (h, w), (out_h, out_w) = x.shape[-2:], out
    compute, dtype = wide(x.dtype), ctx.spec.dtype
    ctx.keep(x)

    def body(index: tuple[Index, ...]) -> Expr:
        place = F64 if compute is F64 else F32
        top, bottom, down = _two_positions(index[-2], h, out_h, aligned, scale_h, place)
        left, right, along = _two_positions(index[-1], w, out_w, aligned, scale_w, place)

        def row(at: Index) -> Expr:
            a, b = (cast(x.at((*index[:-2], at, side)), compute) for side in (left, right))
            return op("add", op("mul", op("sub", const(1, compute), along), a), op("mul", along, b))

        mixed = op(
            "add", op("mul", op("sub", const(1, compute), down), row(top)), op("mul", down, row(bottom))
        )
        return cast(mixed, COMPUTE_TYPE[dtype])

    return ctx.generate(body)
