"""Lowerings of running results along one dimension: cumsum, cumprod, cummax, cummin, logcumsumexp."""

from __future__ import annotations

from typing import Any

import torch

from ..graph.spec import TensorSpec, numel
from .index import Index
from .ir import BOOL, COMPUTE_TYPE, F32, F64, Expr, LoopNode, ScanKind, cast
from .lowering import LoopBuilder, decline_if, lowering
from .program import BufRef
from .value import LoopValue, is_dense

aten = torch.ops.aten
FEW_ROWS, LONG_ROW = (
    64,
    1 << 16,
)  # few rows longer than this leave a GPU idle when one program goes through each


def scan(
    ctx: LoopBuilder, kind: ScanKind, x: LoopValue, dim: int, spec: TensorSpec, compute: torch.dtype
) -> LoopValue:
    """The running `kind` of x along a dimension, gathered in `compute`."""
    dim %= max(len(x.shape), 1)
    decline_if(
        spec.dtype is BOOL or x.dtype is BOOL and kind not in ("sum", "prod"), "bool operand or result"
    )
    if not x.shape or x.shape[dim] < 2 or not numel(x.shape):
        position = kind.startswith("arg")
        return ctx.pointwise(lambda e: e, 0 if position else x, shape=x.shape, dtype=spec.dtype)
    decline_if(
        ctx.on_gpu and x.shape[dim] > LONG_ROW and numel(x.shape) < FEW_ROWS * x.shape[dim], "few long rows"
    )

    def body(index: tuple[Index, ...]) -> Expr:
        return cast(x.at(index), compute)

    stride = spec.stride if is_dense(spec) else TensorSpec.dense(spec.shape, spec.dtype).stride
    buffer = ctx.new_buffer(TensorSpec(spec.shape, stride, spec.dtype))
    ctx.add(
        LoopNode(
            buffer.name, spec.shape, body, stride, spec.dtype, scan=kind, along=dim, origin=str(ctx.node)
        )
    )
    return LoopValue(spec.shape, spec.dtype, ref=BufRef.whole(buffer))


def _gathered_in(ctx: LoopBuilder, dtype: torch.dtype) -> torch.dtype:
    """Eager's type for running sums: float64 for float32 on a CPU."""
    return F64 if dtype is F32 and not ctx.on_gpu else COMPUTE_TYPE[dtype]


def _running(kind: ScanKind) -> Any:
    def rule(ctx: LoopBuilder, x: LoopValue, dim: int, *, dtype: torch.dtype | None = None) -> LoopValue:
        return scan(ctx, kind, x, dim, ctx.spec, _gathered_in(ctx, ctx.spec.dtype))

    return rule


lowering(aten.cumsum.default)(_running("sum"))
lowering(aten.cumprod.default)(_running("prod"))


@lowering(aten.logcumsumexp.default)
def _logcumsumexp(ctx: LoopBuilder, x: LoopValue, dim: int) -> LoopValue:
    decline_if(not x.dtype.is_floating_point, "complex operand")
    return scan(ctx, "logaddexp", x, dim, ctx.spec, _gathered_in(ctx, x.dtype))


def _extreme(kind: ScanKind, position: ScanKind) -> Any:
    def rule(ctx: LoopBuilder, x: LoopValue, dim: int) -> tuple[LoopValue, LoopValue]:
        ctx.keep(x)
        compute = COMPUTE_TYPE[x.dtype]
        return scan(ctx, kind, x, dim, ctx.spec[0], compute), scan(
            ctx, position, x, dim, ctx.spec[1], compute
        )

    return rule


lowering(aten.cummax.default)(_extreme("max", "argmax"))
lowering(aten.cummin.default)(_extreme("min", "argmin"))
