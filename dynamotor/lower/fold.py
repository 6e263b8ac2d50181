"""Constant folding at inference: batch norm goes into convolution weights, static parts are computed once.

`split_constants` cuts every part of the graph that depends on parameters and buffers only out into a graph of
its own; its results become further inputs. The caller computes them when the contents of the static inputs
have changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..base import compat
from ..graph.module import copied, graph_module
from ..graph.nodes import needed_for, operand, overload, spec_of, take_place
from ..graph.op_facts import facts
from ..graph.shapes import call
from ..graph.spec import GraphInfo, TensorSpec, aten
from .pass_helpers import placeholders, static_nodes
from .realize import READ_ONCE

_BATCH_NORM_EVAL = {
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default,
}
# Made in a kernel faster than read from memory: they are no constants worth keeping.
_CHEAP = {
    aten.full.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.scalar_tensor.default,
    aten.empty.memory_format,
    aten.zeros.default,
    aten.ones.default,
}
# Reading the sources to see whether they changed must not cost more than this many times what the results
# hold.
_MAX_READ = 4


@dataclass(frozen=True)
class Fold:
    """The split-off part: `gm(*[inputs[i] for i in sources])` gives the constants: values of the last `count`
    inputs.
    """

    gm: fx.GraphModule
    sources: tuple[int, ...]
    count: int


def _arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by name."""
    schema = overload(node)._schema
    named = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    return {**named, **node.kwargs}


def fold_batch_norm(gm: fx.GraphModule, info: GraphInfo) -> None:
    """conv → batch norm in eval mode, with static weights: scale the weights and drop the batch norm."""
    graph = gm.graph
    static = static_nodes(graph, info)
    for norm in [n for n in graph.nodes if n.op == "call_function" and n.target in _BATCH_NORM_EVAL]:
        a = _arguments(norm)
        conv = a["input"]
        used = list(norm.users)
        if a.get("training", False) or any(u.args[1] != 0 for u in used) or not used:
            continue
        if conv.op != "call_function" or conv.target is not aten.convolution.default or len(conv.users) > 1:
            continue
        weight, bias, transposed = conv.args[1], conv.args[2], conv.args[6]
        parameters = [
            n
            for n in (weight, bias, a["weight"], a["bias"], a["running_mean"], a["running_var"])
            if n is not None
        ]
        if transposed or a["running_mean"] is None or any(n not in static for n in parameters):
            continue
        if any(spec_of(n).dtype not in (torch.float32, torch.float64) for n in parameters):
            continue
        with graph.inserting_before(norm):  # statistics may be computed behind the convolution
            new_weight, new_bias = _scaled(graph, weight, bias, a)
            folded = call(
                graph, conv.target, conv.args[0], new_weight, new_bias, *conv.args[3:], spec=conv.meta["val"]
            )
        for user in used:
            take_place(folded, user)
        graph.erase_node(norm)
        graph.erase_node(conv)


def _scaled(
    graph: fx.Graph, weight: fx.Node, bias: fx.Node | None, a: dict[str, Any]
) -> tuple[fx.Node, fx.Node]:
    """Weight and bias of the convolution that does the batch norm too."""
    deviation = call(graph, aten.rsqrt.default, call(graph, aten.add.Tensor, a["running_var"], a["eps"]))
    scale = deviation if a["weight"] is None else call(graph, aten.mul.Tensor, a["weight"], deviation)
    rank = len(spec_of(weight).shape)
    broadcast = call(graph, aten.view.default, scale, [-1] + [1] * (rank - 1))
    mean = a["running_mean"] if bias is None else call(graph, aten.sub.Tensor, a["running_mean"], bias)
    shift = call(graph, aten.mul.Tensor, mean, scale)
    new_bias = (
        call(graph, aten.neg.default, shift)
        if a["bias"] is None
        else call(graph, aten.sub.Tensor, a["bias"], shift)
    )
    return call(graph, aten.mul.Tensor, weight, broadcast), new_bias


def split_constants(gm: fx.GraphModule, info: GraphInfo) -> tuple[Fold | None, GraphInfo]:
    """Cut the static parts out of `gm` (in place); they become inputs after the others, and static ones."""
    graph = gm.graph
    inputs = placeholders(graph)
    static = static_nodes(graph, info) - set(inputs)
    wanted = [node for node in _boundary(graph, static) if _pays(node)]
    if not wanted:
        return None, info
    needed = needed_for(wanted)
    sources = tuple(i for i, node in enumerate(inputs) if node in needed)
    part = fx.Graph()
    copies = copied(part, (), [node for node in graph.nodes if node in needed])
    part.output(tuple(copies[node] for node in wanted))
    last = inputs[-1] if inputs else None
    made: list[int] = []
    for number, node in enumerate(wanted):
        with graph.inserting_after(last) if last else graph.inserting_before(next(iter(graph.nodes))):
            last = graph.placeholder(f"folded_{number}")
        last.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(last)
        made.append(len(inputs) + number)
    graph.eliminate_dead_code()
    gm.recompile()
    fold = Fold(graph_module(part, "Constants", gm), sources, len(wanted))
    return fold, replace(info, static_inputs=info.static_inputs | frozenset(made))


def _boundary(graph: fx.Graph, static: set[fx.Node]) -> list[fx.Node]:
    """Static nodes that the rest of the graph reads; for a view, its base (the view is made again, it is
    free).
    """
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node not in static or READ_ONCE in node.meta or all(user in static for user in node.users):
            continue
        while (
            node.op == "call_function"
            and isinstance(node.target, compat.OpOverload)
            and facts(node.target).is_view
        ):
            node = operand(node, 0)
        if (
            node in static
            and READ_ONCE not in node.meta
            and node.op == "call_function"
            and isinstance(node.target, compat.OpOverload)
            and node.target not in _CHEAP
            and isinstance(node.meta["val"], TensorSpec)
        ):
            found[node] = None
    return list(found)


def _pays(node: fx.Node) -> bool:
    """Whether reading the sources at each call (to see that they are the same) is cheap beside the folded
    computation:
    saved.
    """
    read = sum(spec_of(n).nbytes for n in needed_for([node]) if n.op == "placeholder")
    return read <= _MAX_READ * node.meta["val"].nbytes or read <= 4096
