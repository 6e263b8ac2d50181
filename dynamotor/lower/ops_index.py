"""Lowerings that read at computed positions: embedding, index, gather. Positions are checked where they are
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..graph.nodes import spec_of
from ..graph.sizes import Dim, Dims, known
from .index_expr import Index, Loaded, Var, is_one
from .ir import I64, Expr, cast, make, walk
from .lowering import LoopBuilder, decline_if, lowering
from .value import LoopValue, broadcast_index, broadcast_shape

aten = torch.ops.aten
INTEGERS = (torch.int64, torch.int32)
CACHE_LINE = 16  # elements of float32
Places = Callable[[tuple[Index, ...]], tuple[Index, ...]]


def loaded_index(e: Expr, size: Dim, wrap: bool = True) -> Index:
    """A value as a position along a dimension of `size`; with `wrap` negative values count from the end.

    A value outside is told to the caller, who raises IndexError; position 0 is read instead.
    """
    if e.op == "const" and type(size) is int and (0 <= e.args[0] < size or (wrap and -size <= e.args[0] < 0)):
        return Index.of(e.args[0] % size)
    return Index.of(Loaded(make("wrap_index", (cast(e, I64), size, wrap), I64), size))


def read_at(ctx: LoopBuilder, x: LoopValue, places: Places) -> LoopValue:
    """x at computed places. A value that is the same at all of them is left to aten: a kernel would not
    look at the
    positions.
    """
    value = ctx.generate(lambda i: x.at(places(i)))
    ctx.whole(x)
    index = tuple(Index.of(Var(f"p{d}", n)) for d, n in enumerate(value.shape))
    asked = {atom.expr for part in places(index) for atom in part.terms if isinstance(atom, Loaded)}
    decline_if(not asked.issubset(walk(value.at(index))), "nothing depends on the positions")
    return value


@lowering(aten.embedding.default)
def _embedding(
    ctx: LoopBuilder,
    weight: LoopValue,
    indices: LoopValue,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> LoopValue:
    decline_if(indices.dtype not in INTEGERS or not weight.shape[0], "index dtype")
    ctx.keep(indices)
    rank = len(indices.shape)
    return read_at(
        ctx, weight, lambda i: (loaded_index(indices.at(i[:rank]), weight.shape[0], wrap=False), *i[rank:])
    )


@lowering(aten.index_select.default)
def _index_select(ctx: LoopBuilder, x: LoopValue, dim: int, index: LoopValue) -> LoopValue:
    decline_if(
        index.dtype not in INTEGERS or len(index.shape) != 1 or not x.shape or not x.shape[dim],
        "index dtype or shape",
    )
    dim %= len(x.shape)
    ctx.keep(index)
    return read_at(
        ctx,
        x,
        lambda i: (*i[:dim], loaded_index(index.at((i[dim],)), x.shape[dim], wrap=False), *i[dim + 1 :]),
    )


@lowering(aten.gather.default)
def _gather(
    ctx: LoopBuilder, x: LoopValue, dim: int, index: LoopValue, sparse_grad: bool = False
) -> LoopValue:
    decline_if(not x.shape or not x.shape[dim] or len(index.shape) != len(x.shape), "0-d or empty operand")
    dim %= len(x.shape)
    ctx.keep(index)
    return read_at(
        ctx, x, lambda i: (*i[:dim], loaded_index(index.at(i), x.shape[dim], wrap=False), *i[dim + 1 :])
    )


def advanced(ctx: LoopBuilder, x: LoopValue, indices: Sequence[Any]) -> tuple[Dims, Places]:
    """Advanced indexing of x with integer tensors: (shape of the indexed part, where in x each of its
    positions lies).

    The indexed dimensions become the indices' broadcast shape, in their place when they are adjacent, in
    front otherwise.
    """
    given = [(d, v) for d, v in enumerate(indices) if v is not None]
    decline_if(
        not given or any(v.dtype not in INTEGERS for _, v in given) or any(not x.shape[d] for d, _ in given),
        "boolean or empty index",
    )
    common = broadcast_shape(*(v.shape for _, v in given))
    dims = [d for d, _ in given]
    start = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    rest = [n for d, n in enumerate(x.shape) if d not in dims]
    for _, v in given:
        ctx.keep(v)

    def places(index: tuple[Index, ...]) -> tuple[Index, ...]:
        picked = index[start : start + len(common)]
        left = [*index[:start], *index[start + len(common) :]]
        positions = {d: loaded_index(v.at(broadcast_index(picked, v.shape)), x.shape[d]) for d, v in given}
        return tuple(positions[d] if d in positions else left.pop(0) for d in range(len(x.shape)))

    return (*rest[:start], *common, *rest[start:]), places


@lowering(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(ctx: LoopBuilder, x: LoopValue, indices: Sequence[Any]) -> LoopValue:
    decline_if(_crosses_memory(ctx, indices), "aten crosses memory faster on a CPU")
    _, places = advanced(ctx, x, indices)
    return read_at(ctx, x, places)


def _crosses_memory(ctx: LoopBuilder, indices: Sequence[Any]) -> bool:
    """Whether rows of a transposed matrix are picked on a CPU: each element of a row is in a cache line of
    its own.
    """
    stride = spec_of(ctx.node.args[0]).stride
    if ctx.on_gpu or len(stride) != 2 or [d for d, v in enumerate(indices) if v is not None] != [0]:
        return False
    return is_one(stride[0]) and known(">=", stride[1] - CACHE_LINE)
