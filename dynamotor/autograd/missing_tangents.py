"""A backward without the gradients that never arrive: the loss does not see every output (logits beside a
model's own loss).

Eager's autograd skips what only such outputs lead to, and so keeps a NaN there to itself. Here the missing
tangents are followed through the graph. A gradient is linear in the tangents that it is made of, so one that
is made of missing ones alone is absent too, whatever ops are between; a sum with it is its other operand, and
only what else reads it reads zeros.

>>> # positions among the placeholders; None where it cannot be done
>>> without_tangents(backward, frozenset({5}))
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..graph.module import graph_module
from ..graph.shapes import call
from ..graph.sizes import numbers
from ..graph.spec import TensorSpec, aten
from .partition import dependents
from .simplify import has_effect, multiply_zeros_without_memory, remove_dead_code

Node = torch.fx.Node
NOTHING = object()  # stands for a gradient that is zero because none arrives


class _CannotFill(Exception):
    """A zero whose sizes differ between calls, or that is no single tensor."""


def _is_gradient(node: Node) -> bool:
    """Whether the node may hold gradients: a formula's question about one (`grad == 0`, a size) is not zero
    where
    it is.
    """
    found = node.meta.get("val")
    specs = found if isinstance(found, (tuple, list)) else (found,)
    return all(
        isinstance(s, TensorSpec) and (s.dtype.is_floating_point or s.dtype.is_complex)
        for s in specs
        if s is not None
    )


def _other_operand(node: Node, a: Any, b: Any) -> Any:
    """The value of a sum with an absent gradient; None if it has to be calculated."""
    if a is NOTHING and node.kwargs.get("alpha", 1) != 1:
        return None
    other = b if a is NOTHING else a
    if not isinstance(other, Node):
        return None
    have, want = other.meta["val"], node.meta["val"]
    same = (have.shape, have.dtype, have.device) == (want.shape, want.dtype, want.device)
    return (
        other if same and have.stride == want.stride else None
    )  # what follows may be a view that only the sum's strides allow


def _zeros(graph: torch.fx.Graph, spec: TensorSpec) -> Node:
    """Zeros in the spec's layout: row-major ones, their dimensions in another order, or a view of as
    much memory.
    """
    order = sorted(range(len(spec.shape)), key=lambda d: (-spec.stride[d], d))
    flat = TensorSpec.dense(tuple(spec.shape[d] for d in order), spec.dtype, spec.device)
    as_view = flat.stride != tuple(
        spec.stride[d] for d in order
    )  # holes, or places that are several elements
    if as_view:
        flat = TensorSpec.dense((spec.extent,), spec.dtype, spec.device)
    kind = {"dtype": spec.dtype, "device": spec.device}
    zeros = call(graph, aten.full.default, list(numbers(flat.shape)), 0, spec=flat, **kind)
    if as_view:
        layout = list(numbers(spec.shape)), list(numbers(spec.stride))
        return call(graph, aten.as_strided.default, zeros, *layout, 0, spec=replace(spec, offset=0))
    back = [order.index(d) for d in range(len(order))]
    return call(graph, aten.permute.default, zeros, back, spec=spec)


def without_tangents(
    gm: torch.fx.GraphModule, absent: frozenset[int], first: int, reached: frozenset[int] = frozenset()
) -> torch.fx.GraphModule | None:
    """A copy of the backward graph without these placeholders. Gradients that come from nowhere else are
    None.

    first: the position of the first tangent; saved values come before. reached: gradients that a tangent
    which arrives does lead to, if only by ops without slope (`floor`): zeros, as eager has it.
    """
    graph = torch.fx.Graph()
    env: dict[Node, Any] = {}
    rest: dict[Node, Node] = {}  # sums of absent gradients and values made of no tangent (zero times a slope)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    arriving = [p for n, p in enumerate(placeholders) if n >= first and n not in absent]
    present = dependents(list(gm.graph.nodes), arriving)

    def fill(node: Node) -> Any:
        value, spec = env[node], node.meta.get("val")
        if value is not NOTHING:
            return value
        if not isinstance(spec, TensorSpec) or spec.is_symbolic:
            raise _CannotFill
        return _zeros(graph, spec)

    def copy(node: Node) -> Any:
        if not any(env[a] is NOTHING for a in node.all_input_nodes):
            return graph.node_copy(node, env.__getitem__)
        same = None
        if node.target is aten.add.Tensor:
            same = _other_operand(node, *torch.fx.map_arg(node.args, env.__getitem__))
        if node not in present and _is_gradient(node) and not has_effect(node):
            if same is not None and same is not NOTHING:
                rest[node] = same
            return NOTHING
        return graph.node_copy(node, fill) if same is None else same

    def gradient(value: Any, is_reached: bool) -> Any:
        if env.get(value) is NOTHING:
            return (rest.get(value) or fill(value)) if is_reached else None
        return env.get(value, value)

    try:
        for position, node in enumerate(gm.graph.nodes):
            if position in absent:
                env[node] = NOTHING
            elif node.op == "output":
                graph.output(tuple([gradient(v, k in reached) for k, v in enumerate(node.args[0])]))
            else:
                env[node] = copy(node)
    except _CannotFill:
        return None
    found = graph_module(graph)
    multiply_zeros_without_memory(found)  # a sum with an absent gradient may be such a zero now
    remove_dead_code(found)
    return found
