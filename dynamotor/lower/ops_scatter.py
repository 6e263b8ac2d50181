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

from ..graph.spec import HALVES, contiguous_stride, numel
from .index import Index, flatten
from .ir import BOOL, COMPUTE_TYPE, F32, I32, I64, Expr, Node, cast, compare, const, op, select
from .lowering import Decline, Lowering, Scalar, lowering
from .ops_index import INTEGERS, Places, advanced, loaded_index
from .program import BufRef
from .value import Value, expand, is_dense

aten = torch.ops.aten


def scatter(ctx: Lowering, base: Value, source: Value, places: Places, add: bool = False) -> Value:
    """base with the elements of `source` put at `places(index)`, or added there. Half precisions are summed
    in float32.
    """
    spec = ctx.spec
    if ctx.on_gpu and torch.are_deterministic_algorithms_enabled():
        raise Decline("a deterministic algorithm is wanted")
    if add and (spec.dtype is BOOL or (ctx.on_gpu and _summed_in(spec.dtype) not in _ATOMIC)):
        raise Decline("sums of this dtype")
    if not numel(source.shape):
        return ctx.pointwise(lambda e: e, base)
    memory = _summed_in(spec.dtype) if add else spec.dtype
    stride = spec.stride if is_dense(spec) else contiguous_stride(spec.shape)
    start = base if base.dtype is memory else ctx.pointwise(lambda e: e, base, dtype=memory)
    ref = ctx.copy(start, stride)
    kind = COMPUTE_TYPE[memory]

    def body(index: tuple[Index, ...]) -> Expr:
        return cast(source.at(index), kind)

    def place(index: tuple[Index, ...]) -> Index:
        return flatten(places(index), ref.stride, ref.offset)

    node = Node(ref.name, source.shape, body, contiguous_stride(source.shape), memory, scatter=place, add=add)
    node.in_order, node.after, node.origin = not ctx.on_gpu, frozenset({ref.name}), str(ctx.node)
    ctx.add(node)
    result = Value(spec.shape, memory, ref=BufRef(ref.name, spec.shape, stride, 0, memory))
    return result if memory is spec.dtype else ctx.pointwise(lambda e: e, result)


_ATOMIC = (F32, torch.float64, I32, I64)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """The memory type in which sums are gathered."""
    return F32 if dtype in HALVES else dtype


def _zeros(ctx: Lowering, dtype: torch.dtype) -> Value:
    e = const(0, COMPUTE_TYPE[dtype])
    return Value(ctx.spec.shape, dtype, lambda index: e)


# -- along one dimension -------------------------------------------------------------------------------------
def _along(ctx: Lowering, x: Value, dim: int, index: Value, source: Value, add: bool) -> Value:
    """Element `i` of source goes where index says along `dim`, and stays where it is along the others."""
    if not x.shape or len(index.shape) != len(x.shape) or not x.shape[dim] or index.dtype not in INTEGERS:
        raise Decline("0-d or empty operand")
    dim %= len(x.shape)
    ctx.keep(index)
    ctx.keep_if_heavy(source)
    part = Value(index.shape, source.dtype, source.at)  # an index may be smaller than its source
    size = x.shape[dim]
    return scatter(
        ctx, x, part, lambda i: (*i[:dim], loaded_index(index.at(i), size, wrap=False), *i[dim + 1 :]), add
    )


@lowering(aten.scatter.src)
def _scatter_src(ctx: Lowering, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _along(ctx, x, dim, index, source, False)


@lowering(aten.scatter.value)
def _scatter_value(ctx: Lowering, x: Value, dim: int, index: Value, value: Scalar) -> Value:
    e = const(value, COMPUTE_TYPE[x.dtype])
    return _along(ctx, x, dim, index, Value(index.shape, x.dtype, lambda i: e), False)


@lowering(aten.scatter_add.default)
def _scatter_add(ctx: Lowering, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _along(ctx, x, dim, index, source, True)


@lowering(aten.scatter_reduce.two)
def _scatter_reduce(
    ctx: Lowering, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if reduce != "sum" or not include_self:
        raise Decline("a reduction that is no plain sum")
    return _along(ctx, x, dim, index, source, True)


@lowering(aten.scatter.reduce)
def _scatter_with(ctx: Lowering, x: Value, dim: int, index: Value, source: Value, *, reduce: str) -> Value:
    if reduce != "add":
        raise Decline("a product")
    return _along(ctx, x, dim, index, source, True)


def _slices(ctx: Lowering, x: Value, dim: int, index: Value, wrap: bool) -> Places:
    """Where the elements of a source go whose slices along `dim` are put at the positions in `index`."""
    if not x.shape or not x.shape[dim] or index.dtype not in INTEGERS or len(index.shape) > 1:
        raise Decline("0-d or empty operand")
    dim %= len(x.shape)
    ctx.keep(index)
    size = x.shape[dim]

    def places(i: tuple[Index, ...]) -> tuple[Index, ...]:
        at = index.at((i[dim],) if index.shape else ())
        return (*i[:dim], loaded_index(at, size, wrap=wrap), *i[dim + 1 :])

    return places


@lowering(aten.index_copy.default)
def _index_copy(ctx: Lowering, x: Value, dim: int, index: Value, source: Value) -> Value:
    places = _slices(ctx, x, dim, index, wrap=False)
    if len(source.shape) != len(x.shape):
        raise Decline("a source of another rank")
    ctx.keep_if_heavy(source)
    return scatter(ctx, x, source, places)


@lowering(aten.index_fill.int_Scalar)
def _index_fill(ctx: Lowering, x: Value, dim: int, index: Value, value: Scalar) -> Value:
    places = _slices(ctx, x, dim, index, wrap=True)
    e = const(value, COMPUTE_TYPE[x.dtype])
    dim %= len(x.shape)
    shape = (*x.shape[:dim], numel(index.shape), *x.shape[dim + 1 :])
    return scatter(ctx, x, Value(shape, x.dtype, lambda i: e), places)


def index_add(ctx: Lowering, x: Value, dim: int, index: Value, source: Value, alpha: Scalar) -> Value:
    """Slices of source added to the slices of x that index names."""
    places = _slices(ctx, x, dim, index, wrap=False)
    ctx.keep_if_heavy(source)
    kind = COMPUTE_TYPE[_summed_in(x.dtype)]

    def scaled(i: tuple[Index, ...]) -> Expr:
        e = cast(source.at(i), kind)
        return e if alpha == 1 else op("mul", e, const(alpha, kind))

    return scatter(ctx, x, Value(source.shape, _summed_in(x.dtype), scaled), places, add=True)


# -- advanced indices ----------------------------------------------------------------------------------------
@lowering(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(
    ctx: Lowering, x: Value, indices: Sequence[Any], values: Value, accumulate: bool = False
) -> Value:
    shape, places = advanced(ctx, x, indices)
    ctx.keep_if_heavy(values)
    return scatter(ctx, x, expand(values, shape), places, accumulate)


@lowering(aten.embedding_dense_backward.default)
def _embedding_dense_backward(
    ctx: Lowering, grad: Value, indices: Value, rows: int, padding: int, by_frequency: bool
) -> Value:
    """On a CPU aten's kernel, which shares the rows of the table among threads."""
    if not ctx.on_gpu or by_frequency or indices.dtype not in INTEGERS or not rows:
        return ctx.extern(
            aten.embedding_dense_backward.default, (grad, indices, rows, padding, by_frequency), agnostic=True
        )
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
        Value(grad.shape, grad.dtype, kept),
        lambda i: (loaded_index(indices.at(i[:rank]), rows, wrap=False), i[rank]),
        add=True,
    )
