"""Lowerings that write at computed positions: scatter, scatter_add, index_put, gradients of reads at
positions.

A copy of the operand is made first; then one loop over the values puts each in its place. On a CPU it runs in
eager's order; on a GPU sums are atomic, so their last bits may differ from run to run, and deterministic
algorithms are left to aten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..base.registry import register_all
from ..graph.spec import HALVES, aten, contiguous_stride, numel
from .claim import apart, claim, claimable, keep_apart
from .index_expr import Index, flatten
from .ir import BOOL, COMPUTE_TYPE, F32, I32, I64, Expr, LoopNode, cast, compare, const, op, select
from .lowering import LoopBuilder, Scalar, decline_if, lowering
from .ops_index import INTEGERS, Places, advanced, loaded_index
from .program import BufRef
from .value import LoopValue, expand, is_dense


def scatter(
    ctx: LoopBuilder, base: LoopValue, source: LoopValue, places: Places, add: bool = False
) -> LoopValue:
    """base with the elements of `source` put at `places(index)`, or added there. Half precisions are summed
    in float32.
    """
    spec = ctx.spec
    decline_if(
        ctx.on_gpu and torch.are_deterministic_algorithms_enabled(), "a deterministic algorithm is wanted"
    )
    decline_if(
        add and (spec.dtype is BOOL or (ctx.on_gpu and _summed_in(spec.dtype) not in _ATOMIC)),
        "sums of this dtype",
    )
    if not numel(source.shape):
        return ctx.pointwise(lambda e: e, base)
    half = add and spec.dtype in HALVES
    decline_if(half and not ctx.on_gpu and claimable(ctx, base), "sums in half precision, in place")
    mine = None if half else claim(ctx, base)
    memory = _summed_in(spec.dtype) if add and mine is None else spec.dtype
    ref = mine or _copied(ctx, base, memory)
    if mine is not None:
        source = apart(ctx, source, None)
    kind = COMPUTE_TYPE[memory]

    def body(index: tuple[Index, ...]) -> Expr:
        return cast(source.at(index), kind)

    def place(index: tuple[Index, ...]) -> Index:
        return flatten(places(index), ref.stride, ref.offset)

    node = LoopNode(
        ref.name, source.shape, body, contiguous_stride(source.shape), memory, scatter=place, add=add
    )
    node.in_order, node.after, node.origin = not ctx.on_gpu, frozenset({ref.name}), str(ctx.node)
    ctx.add(node)
    result = LoopValue(spec.shape, memory, ref=ref)
    return result if memory is spec.dtype else ctx.pointwise(lambda e: e, result)


def _copied(ctx: LoopBuilder, base: LoopValue, memory: torch.dtype) -> BufRef:
    """The operand in new memory."""
    spec = ctx.spec
    start = base if base.dtype is memory else ctx.pointwise(lambda e: e, base, dtype=memory)
    return ctx.copy(start, spec.stride if is_dense(spec) else contiguous_stride(spec.shape))


_ATOMIC = (F32, torch.float64, I32, I64)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """The memory type in which sums are gathered."""
    return F32 if dtype in HALVES else dtype


def _zeros(ctx: LoopBuilder, dtype: torch.dtype) -> LoopValue:
    e = const(0, COMPUTE_TYPE[dtype])
    return LoopValue(ctx.spec.shape, dtype, lambda index: e)


# -- along one dimension -------------------------------------------------------------------------------------
def _along(
    ctx: LoopBuilder, x: LoopValue, dim: int, index: LoopValue, source: LoopValue, add: bool
) -> LoopValue:
    """Element `i` of source goes where index says along `dim`, and stays where it is along the others."""
    decline_if(
        not x.shape or len(index.shape) != len(x.shape) or not x.shape[dim] or index.dtype not in INTEGERS,
        "0-d or empty operand",
    )
    dim %= len(x.shape)
    index = keep_apart(ctx, index, x)
    ctx.keep_if_heavy(source)
    part = LoopValue(index.shape, source.dtype, source.at)  # an index may be smaller than its source
    size = x.shape[dim]
    return scatter(
        ctx, x, part, lambda i: (*i[:dim], loaded_index(index.at(i), size, wrap=False), *i[dim + 1 :]), add
    )


register_all(
    lowering,
    (
        ((aten.scatter.src,), lambda ctx, x, dim, index, source: _along(ctx, x, dim, index, source, False)),
        ((aten.scatter_add.default,), lambda ctx, x, dim, index, src: _along(ctx, x, dim, index, src, True)),
    ),
)


@lowering(aten.scatter.value)
def _scatter_value(ctx: LoopBuilder, x: LoopValue, dim: int, index: LoopValue, value: Scalar) -> LoopValue:
    e = const(value, COMPUTE_TYPE[x.dtype])
    return _along(ctx, x, dim, index, LoopValue(index.shape, x.dtype, lambda i: e), False)


@lowering(aten.scatter_reduce.two)
def _scatter_reduce(
    ctx: LoopBuilder,
    x: LoopValue,
    dim: int,
    index: LoopValue,
    source: LoopValue,
    reduce: str,
    *,
    include_self: bool = True,
) -> LoopValue:
    decline_if(reduce != "sum" or not include_self, "a reduction that is no plain sum")
    return _along(ctx, x, dim, index, source, True)


@lowering(aten.scatter.reduce)
def _scatter_with(
    ctx: LoopBuilder, x: LoopValue, dim: int, index: LoopValue, source: LoopValue, *, reduce: str
) -> LoopValue:
    decline_if(reduce != "add", "a product")
    return _along(ctx, x, dim, index, source, True)


def _slices(ctx: LoopBuilder, x: LoopValue, dim: int, index: LoopValue, wrap: bool) -> Places:
    """Where the elements of a source go whose slices along `dim` are put at the positions in `index`."""
    decline_if(
        not x.shape or not x.shape[dim] or index.dtype not in INTEGERS or len(index.shape) > 1,
        "0-d or empty operand",
    )
    dim %= len(x.shape)
    index = keep_apart(ctx, index, x)
    size = x.shape[dim]

    def places(i: tuple[Index, ...]) -> tuple[Index, ...]:
        at = index.at((i[dim],) if index.shape else ())
        return (*i[:dim], loaded_index(at, size, wrap=wrap), *i[dim + 1 :])

    return places


@lowering(aten.index_copy.default)
def _index_copy(ctx: LoopBuilder, x: LoopValue, dim: int, index: LoopValue, source: LoopValue) -> LoopValue:
    places = _slices(ctx, x, dim, index, wrap=False)
    decline_if(len(source.shape) != len(x.shape), "a source of another rank")
    ctx.keep_if_heavy(source)
    return scatter(ctx, x, source, places)


@lowering(aten.index_fill.int_Scalar)
def _index_fill(ctx: LoopBuilder, x: LoopValue, dim: int, index: LoopValue, value: Scalar) -> LoopValue:
    places = _slices(ctx, x, dim, index, wrap=True)
    e = const(value, COMPUTE_TYPE[x.dtype])
    dim %= len(x.shape)
    shape = (*x.shape[:dim], numel(index.shape), *x.shape[dim + 1 :])
    return scatter(ctx, x, LoopValue(shape, x.dtype, lambda i: e), places)


def index_add(
    ctx: LoopBuilder, x: LoopValue, dim: int, index: LoopValue, source: LoopValue, alpha: Scalar
) -> LoopValue:
    """Slices of source added to the slices of x that index names."""
    places = _slices(ctx, x, dim, index, wrap=False)
    ctx.keep_if_heavy(source)
    kind = COMPUTE_TYPE[_summed_in(x.dtype)]

    def scaled(i: tuple[Index, ...]) -> Expr:
        e = cast(source.at(i), kind)
        return e if alpha == 1 else op("mul", e, const(alpha, kind))

    return scatter(ctx, x, LoopValue(source.shape, _summed_in(x.dtype), scaled), places, add=True)


# -- advanced indices ----------------------------------------------------------------------------------------
@lowering(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(
    ctx: LoopBuilder, x: LoopValue, indices: Sequence[Any], values: LoopValue, accumulate: bool = False
) -> LoopValue:
    indices = [keep_apart(ctx, i, x) if isinstance(i, LoopValue) else i for i in indices]
    shape, places = advanced(ctx, x, indices)
    ctx.keep_if_heavy(values)
    return scatter(ctx, x, expand(values, shape), places, accumulate)


@lowering(aten.embedding_dense_backward.default)
def _embedding_dense_backward(
    ctx: LoopBuilder, grad: LoopValue, indices: LoopValue, rows: int, padding: int, by_frequency: bool
) -> LoopValue:
    """On a CPU aten's kernel, which shares the rows of the table among threads."""
    if not ctx.on_gpu or by_frequency or indices.dtype not in INTEGERS or not rows:
        args = grad, indices, rows, padding, by_frequency
        summed: LoopValue = ctx.extern(aten.embedding_dense_backward.default, args, agnostic=True)
        return summed
    ctx.keep(indices)
    ctx.keep_if_heavy(grad)
    rank = len(indices.shape)

    def kept(i: tuple[Index, ...]) -> Expr:
        e = grad.at(i)
        used = compare("ne", indices.at(i[:rank]), const(padding, COMPUTE_TYPE[indices.dtype]))
        return e if padding < 0 else select(used, e, const(0, e.dtype))

    return scatter(
        ctx,
        _zeros(ctx, _summed_in(ctx.spec.dtype)),
        LoopValue(grad.shape, grad.dtype, kept),
        lambda i: (loaded_index(indices.at(i[:rank]), rows, wrap=False), i[rank]),
        add=True,
    )
