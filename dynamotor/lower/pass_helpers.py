"""Helpers of graph passes: ask about users, find static values."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from ..base import compat
from ..graph.nodes import operand, overload
from ..graph.op_facts import facts, meets_ranks
from ..graph.spec import GraphInfo, aten


def looks_at_another(node: fx.Node) -> bool:
    """Whether a node's result shares the memory of its first operand."""
    if node.target in (aten._unsafe_view.default, aten.reshape.default):
        return True
    return isinstance(node.target, compat.OpOverload) and facts(node.target).is_view


def only_user(node: fx.Node) -> fx.Node | None:
    """The one node that uses this one, or None when there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def added_to(node: fx.Node, total: fx.Node | None) -> fx.Node | None:
    """The other operand of a sum that has a node and another one as operands."""
    plain = total is not None and total.op == "call_function" and total.target is torch.ops.aten.add.Tensor
    if total is None or not plain or total.kwargs.get("alpha", 1) != 1:
        return None
    other = total.args[1] if total.args[0] is node else total.args[0]
    return other if isinstance(other, fx.Node) and other is not node else None


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The graph's inputs, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_node(graph: fx.Graph) -> fx.Node:
    """The graph's output node."""
    output: fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return output


def static_nodes(graph: fx.Graph, info: GraphInfo) -> set[fx.Node]:
    """Nodes whose value depends on static inputs (that the graph does not write) and constants only, with
    these inputs. The memory of results is the caller's, new at each call: it is none of theirs. So are
    messages of other ranks.
    """
    inputs = placeholders(graph)
    static = {node for i, node in enumerate(inputs) if i in info.static_inputs and not _is_written(node)}
    outputs = {root for node in output_node(graph).all_input_nodes for root in _memories(node)}
    for node in graph.nodes:
        if node.op == "get_attr":
            static.add(node)
        elif (
            node.op == "call_function"
            and node not in outputs
            and all(n in static for n in node.all_input_nodes)
        ):
            called = isinstance(node.target, compat.OpOverload)
            if not called or not _has_effects(node) and not meets_ranks(node.target):
                static.add(node)
    return static


def _memories(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and those at whose memory it looks."""
    yield node
    while looks_at_another(node) or node.target is operator.getitem:
        node = operand(node, 0)
        yield node


def _is_written(node: fx.Node) -> bool:
    for user in node.users:
        if user.target is aten.native_batch_norm.default and not user.args[5]:
            continue  # it writes its statistics in training only
        if user.op == "call_function" and isinstance(user.target, compat.OpOverload):
            written = facts(user.target).writes
            if any(
                (user.kwargs.get(w) if isinstance(w, str) else user.args[w] if w < len(user.args) else None)
                is node
                for w in written
            ):
                return True
    return False


def _has_effects(node: fx.Node) -> bool:
    op = overload(node)
    found = facts(op)
    draws = found.random or op._schema.name == "dynamotor::new_seed"
    writes = found.writes and not (op is aten.native_batch_norm.default and not node.args[5])
    return bool(writes) or draws or found.data_dependent or found.asserts
