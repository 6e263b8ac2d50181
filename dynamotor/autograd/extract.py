"""Cut a graph of its own out of the joint graph: chosen inputs, chosen outputs, the nodes between them.

Outputs never share memory with an input or with each other: such values are cloned.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..graph.module import copied, graph_module
from ..graph.nodes import in_order, operand, overload, reached
from ..graph.op_facts import facts
from ..graph.result_strides import is_dense, preserved_stride
from ..graph.shapes import call
from ..graph.size_nodes import is_size
from .functional import with_holes

aten = torch.ops.aten
Node = torch.fx.Node
RESHAPES = {aten._unsafe_view.default}


def is_view(node: Node) -> bool:
    """Whether the node's result may share memory with its first argument when PyTorch runs it."""
    if node.op != "call_function" or is_size(node):
        return False
    if node.target is operator.getitem:
        return is_view(operand(node, 0))
    return node.target in RESHAPES or facts(overload(node)).is_view


def memory_root(node: Node) -> Node:
    """The node whose memory a chain of views looks at."""
    while is_view(node):
        node = operand(node, 0)
    return node


def extract(
    joint: torch.fx.Graph,
    inputs: Sequence[Node],
    outputs: Sequence[Node | None],
    *,
    writes: Sequence[tuple[Node, Node]] = (),
    keep: Sequence[Node] = (),
    anchored: set[Node] | None = None,
) -> torch.fx.GraphModule:
    """A graph module from `inputs` to `outputs`.

    writes: (input, new contents) pairs that become trailing `copy_`. keep: nodes computed although none
    uses them. anchored: when given, the nodes that keep their order; others (recomputed values) are placed
    where they are first used.
    """
    graph = torch.fx.Graph()
    roots = [*outputs, *(value for _, value in writes), *keep]
    env = copied(graph, inputs, _order(joint, roots, set(inputs), anchored))
    written = {target for target, _ in writes}
    result = _own_memory(graph, inputs, outputs, env)
    contents = [_apart(graph, value, env, written) for _, value in writes]
    for (target, _), value in zip(writes, contents, strict=True):
        call(graph, aten.copy_.default, env[target], value, spec=target.meta["val"])
    graph.output(tuple(result))
    return graph_module(graph)


def inputs_of(roots: Sequence[Node | None], boundary: set[Node]) -> set[Node]:
    """The nodes of the boundary that the roots depend on, without looking behind them."""
    start = [node for node in roots if node is not None]
    return reached(start, lambda node: [] if node in boundary else node.all_input_nodes) & boundary


def _order(
    joint: torch.fx.Graph, roots: Sequence[Node | None], known: set[Node], anchored: set[Node] | None
) -> list[Node]:
    """The nodes that the roots depend on. Anchored nodes keep the joint order, the others come just before
    they are used.
    """
    start = [node for node in roots if node is not None and node not in known]
    wanted = reached(start, lambda node: [arg for arg in node.all_input_nodes if arg not in known])
    as_joint = [node for node in joint.nodes if node in wanted]
    if anchored is None:
        return as_joint
    first, later = ([n for n in as_joint if (n in anchored) is is_first] for is_first in (True, False))
    return in_order(
        reversed([*first, *later]),
        lambda node: [arg for arg in reversed(node.all_input_nodes) if arg in wanted],
    )


def _clone(graph: torch.fx.Graph, node: Node) -> Node:
    """A copy with the node's strides; where those leave holes, its memory's root is copied and looked at the
    same way.
    """
    spec = node.meta["val"]
    if is_dense(spec) or not is_view(node) or node.target is operator.getitem:
        dense = call(graph, aten.clone.default, node, spec=spec.with_stride(preserved_stride(spec)))
        return with_holes(dense, spec, lambda func, args, kwargs: call(graph, func, *args, **kwargs))
    source = _clone(graph, operand(node, 0))
    return graph.node_copy(node, lambda arg: source if arg is node.args[0] else arg)


def _own_memory(
    graph: torch.fx.Graph, inputs: Sequence[Node], outputs: Sequence[Node | None], env: dict[Node, Node]
) -> list[Any]:
    """The output nodes of the new graph, cloned where they would share memory with an input or another
    output.

    Gradients too: autograd may keep a gradient that arrives as `param.grad` and later add to it in place.
    """
    taken = {env[node] for node in inputs}
    result: list[Any] = []
    for node in outputs:
        value = None if node is None else env[node]
        if value is not None:
            root = memory_root(value)
            if root in taken:
                value = _clone(graph, value)
            taken.add(root)
        result.append(value)
    return result


def _apart(graph: torch.fx.Graph, value: Node, env: dict[Node, Node], written: set[Node]) -> Node:
    """New contents that do not look at an input which an earlier `copy_` may have overwritten."""
    new = env[value]
    root = memory_root(new)
    return _clone(graph, new) if root in {env[node] for node in written} else new
