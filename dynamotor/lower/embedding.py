"""Gradients of embedding tables: rows are added in place to the existing gradient, instead of into a zeroed
table of
its own.

A table that is also the output projection gets a dense gradient from a matrix product; the embedding's rows
are added to it: `add(mm, embedding_dense_backward(g, i))` becomes `index_add(mm, 0, i, g)`, which saves two
passes over the table. On a GPU a kernel of ours writes the addend anyway.
"""

from __future__ import annotations

import torch
from torch import fx

from ..graph.nodes import arguments, find_spec, operand, spec_of, take_place
from ..graph.shapes import call
from ..graph.spec import GraphInfo, TensorSpec, aten, contiguous_stride, numel
from .claim import apart, claim
from .ir import ExternNode
from .lowering import LoopBuilder, decline_if, lowering
from .ops_scatter import index_add
from .pass_helpers import added_to, only_user
from .program import ExternStep
from .value import LoopValue

# Results of these are in memory of their own, which may be written when they have no other reader.
_OWNED = {aten.mm.default, aten.addmm.default, aten.full.default, aten.index_add.default}


def add_embedding_rows(gm: fx.GraphModule, info: GraphInfo, on_gpu: bool = False) -> None:
    """embedding_dense_backward → index_add into a zeroed table, or into its addend."""
    graph = gm.graph
    for node in [
        n
        for n in graph.nodes
        if n.op == "call_function" and n.target is aten.embedding_dense_backward.default
    ]:
        grad, index, _, padding, by_frequency = arguments(node)
        if (
            by_frequency
            or spec_of(grad).dtype not in (torch.float32, torch.float64)
            or spec_of(node).is_symbolic
        ):
            continue
        total = only_user(node)
        base = _added_to(node, total) if on_gpu else _dense_gradient(node, total)
        if on_gpu and base is None:
            continue
        end: fx.Node = node if base is None or total is None else total
        with graph.inserting_before(end):
            places, width = numel(spec_of(index).shape), spec_of(grad).shape[-1]
            dense = [
                TensorSpec.dense(shape, spec_of(x).dtype, spec_of(x).device)
                for x, shape in ((index, (places,)), (grad, (places, width)))
            ]
            flat_index = call(graph, aten.reshape.default, index, [-1], spec=dense[0])
            flat = call(graph, aten.reshape.default, grad, [-1, width], spec=dense[1])
            if not isinstance(padding, int) or padding >= 0:  # the padding row gets no gradient
                keep = call(
                    graph, aten.ne.Scalar, call(graph, aten.unsqueeze.default, flat_index, 1), padding
                )
                flat = call(graph, aten.where.ScalarOther, keep, flat, 0, spec=dense[1])
            if base is None:
                spec = node.meta["val"]
                base = call(
                    graph, aten.full.default, list(spec.shape), 0, dtype=spec.dtype, device=spec.device
                )
            new = call(graph, aten.index_add.default, base, 0, flat_index, flat, spec=end.meta["val"])
        take_place(new, *dict.fromkeys([end, node]))


def _added_to(node: fx.Node, total: fx.Node | None) -> fx.Node | None:
    """The other operand of the sum that the table's gradient goes into, when it is laid out as the table."""
    other = added_to(node, total)
    if other is None or total is None or not find_spec(other) == find_spec(total) == find_spec(node):
        return None
    return other if spec_of(node).stride == contiguous_stride(spec_of(node).shape) else None


def _dense_gradient(node: fx.Node, total: fx.Node | None) -> fx.Node | None:
    """That operand, when it is a matrix product read only there."""
    other = _added_to(node, total)
    return (
        other if other is not None and other.target is aten.mm.default and only_user(other) is total else None
    )


@lowering(aten.index_add.default)
def _index_add(
    ctx: LoopBuilder, x: LoopValue, dim: int, index: LoopValue, source: LoopValue, *, alpha: float = 1
) -> LoopValue:
    """In place when the value added to is in memory of its own that is read nowhere else."""
    node, spec = ctx.node, ctx.spec
    if ctx.on_gpu:
        return index_add(ctx, x, dim, index, source, alpha)
    decline_if(not numel(spec.shape) or source.dtype is not x.dtype, "empty operand or mixed dtypes")
    base = operand(node, 0)
    owned = (
        base.op == "call_function"
        and base.target in _OWNED
        and only_user(base) is node
        and node.args[3] is not base
    )
    ref = (
        ctx.realize(x, spec.stride) if owned else claim(ctx, x) or ctx.copy(x, contiguous_stride(spec.shape))
    )
    source = apart(ctx, source, None)
    rows, places = ctx.realize(source), ctx.realize(index)
    step = ExternStep(
        aten.index_add_.default, (ref, dim, places, rows), {"alpha": alpha}, (), None, (ref.name,)
    )
    ctx.add(ExternNode(step, frozenset({ref.name, rows.name, places.name}), (), (ref.name,)))
    return LoopValue(x.shape, x.dtype, ref=ref)
