"""Splits a graph in which few calls see sizes that change: all others are parts of fixed sizes, which CUDA
graphs can record once.

A decoding step appends its token to a tensor that grows; the model between reads the last column alone. As
one program of changing sizes it would need a recording for each length.

Levels alternate: calls on changing sizes have even ones, all others odd ones. Each level is a part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..base.compat import OpOverload
from ..graph.module import copy_of, writes
from ..graph.nodes import arguments, overload, reached, spec_of
from ..graph.op_facts import facts, is_custom
from ..graph.shapes import call
from ..graph.size_nodes import is_size
from ..graph.sizes import equal, is_symbolic
from ..graph.spec import GraphInfo, TensorSpec, aten
from .graph_parts import Chain, Compiled, Part, inputs_of, part_of

LEAST_CALLS = 8  # of fixed sizes, for each call on changing sizes: else parts cost more than they save
# Calls on changing sizes that run op by op: their kernels would be bound anew for each set of sizes.
MOST_PLAIN = 8
MOST_PARTS = 2  # of fixed sizes: each is a recording


@dataclass(frozen=True)
class SizeSplit:
    """The parts of a graph in their order, each with whether its sizes are fixed, and its facts."""

    parts: list[tuple[Part, bool, GraphInfo]]
    placeholders: list[fx.Node]
    results: Sequence[Any]

    def around(self, compile_part: Callable[[fx.GraphModule, GraphInfo, bool], Compiled]) -> Compiled:
        """The whole graph's call; `compile_part(gm, info, fixed)` compiles one part."""
        steps: list[tuple[Compiled, Part]] = []
        pure = 0  # parts before the first effect
        for part, fixed, info in self.parts:
            computed = sum(n.op == "call_function" and not _is_view(n) for n in part.gm.graph.nodes)
            plain = computed <= (0 if fixed else MOST_PLAIN)
            pure += pure == len(steps) and plain and all(map(_is_pure, part.gm.graph.nodes))
            steps.append((part.gm.forward if plain else compile_part(part.gm, info, fixed), part))
        return Chain(self.placeholders, self.results, steps, pure)


def split(gm: fx.GraphModule, info: GraphInfo) -> SizeSplit | None:
    """The parts of a graph; None where its sizes are fixed, or too many calls depend on those that change."""
    if not any(is_size(node) for node in gm.graph.nodes if node.op == "placeholder"):
        return None
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and not is_size(node)]
    if 2 * sum(map(_sees_sizes, calls)) > len(calls):  # as most graphs: asked before the graph is copied
        return None
    gm = copy_of(gm)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    results: Any = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    if any(map(_is_arithmetic, results)):
        return None
    _read_ends_of_joins(gm)
    _lay_out_columns(gm)
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and not is_size(node)]
    changing = {node for node in calls if _sees_sizes(node)}
    levels = _levels(calls, changing)
    recorded = {levels[node] for node in calls if node not in changing and not _is_view(node)}
    computed = sum(not _is_view(node) for node in changing)
    if not 0 < len(recorded) <= MOST_PARTS or len(calls) - len(changing) < LEAST_CALLS * computed:
        return None
    parts = []
    for level in sorted(set(levels.values())):
        nodes = [node for node in calls if levels[node] == level]
        read = {n for node in calls if levels[node] > level for n in node.all_input_nodes}
        given = [r for r in dict.fromkeys(results) if isinstance(r, fx.Node) and levels.get(r) == level]
        given += [node for node in nodes if node in read and node not in given]
        part = _part(gm, nodes, given, fixed=level % 2 == 1)
        parts.append((part, level % 2 == 1, _info(part, info, placeholders, results)))
    return SizeSplit(parts, placeholders, results)


def _part(gm: fx.GraphModule, nodes: list[fx.Node], given: list[fx.Node], fixed: bool) -> Part:
    """A part: of fixed sizes, or with the arithmetic on sizes it needs and all symbols as first inputs."""
    if fixed:
        part = part_of(gm, nodes, given)
        part.gm.meta.pop("shape_env", None)
        return part
    sizes = reached(
        [n for node in nodes for n in node.all_input_nodes if is_size(n)], lambda n: n.all_input_nodes
    )
    needed = {*nodes, *filter(_is_arithmetic, sizes)}
    nodes = [node for node in gm.graph.nodes if node in needed]
    symbols = [node for node in gm.graph.nodes if node.op == "placeholder" and is_size(node)]
    return part_of(gm, nodes, given, list(dict.fromkeys([*symbols, *inputs_of(nodes, given)])))


def _info(part: Part, info: GraphInfo, placeholders: Sequence[fx.Node], results: Sequence[Any]) -> GraphInfo:
    static = {placeholders[i] for i in info.static_inputs}
    leading = {r for r in results[: info.n_outputs] if isinstance(r, fx.Node)}
    return replace(
        info,
        static_inputs=frozenset(i for i, node in enumerate(part.inputs) if node in static),
        n_outputs=sum(node in leading for node in part.outputs),
    )


def _is_arithmetic(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "call_function" and is_size(value)


def _sees_sizes(node: fx.Node) -> bool:
    return any(is_size(n) or _is_symbolic(n) for n in (node, *node.all_input_nodes))


def _is_symbolic(node: fx.Node) -> bool:
    val = node.meta.get("val")
    specs = val if isinstance(val, (tuple, list)) else (val,)
    return any(isinstance(spec, TensorSpec) and spec.is_symbolic for spec in specs)


def _is_view(node: fx.Node) -> bool:
    return (
        node.target is operator.getitem or isinstance(node.target, OpOverload) and facts(node.target).is_view
    )


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and facts(node.target).random


def _is_pure(node: fx.Node) -> bool:
    """Whether a call has no effect beside its result."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return True
    return not (writes(node) or _is_random(node) or is_custom(node.target) or facts(node.target).bounded)


def _levels(calls: Sequence[fx.Node], changing: set[fx.Node]) -> dict[fx.Node, int]:
    """The level of each call: behind its inputs, a write behind all readers of the value before, a random
    call behind the one before. Calls on changing sizes then move to the last level in which they can run.
    """
    levels: dict[fx.Node, int] = {}
    last_random = 0
    for node in calls:
        lowest = max([levels.get(n, 0) for n in node.all_input_nodes], default=0)
        if node.target is operator.getitem:  # beside the call of which it is a result
            levels[node] = lowest
            (changing.discard if lowest % 2 else changing.add)(node)
            continue
        if writes(node):
            lowest = max([lowest, *(levels[n] for n in _readers(node.all_input_nodes[0]) if n in levels)])
        if _is_random(node):
            lowest = max(lowest, last_random)
        levels[node] = lowest + (lowest % 2 != (node not in changing))
        last_random = levels[node] if _is_random(node) else last_random
    end = max(levels.values(), default=0) // 2 * 2
    for node in reversed(calls):
        after = [levels[user] for user in node.users if user in levels]
        stays = writes(node) or _is_random(node) or any(u.target is operator.getitem for u in node.users)
        if node in changing and not stays and node.target is not operator.getitem:
            levels[node] = max(levels[node], min(after, default=end) // 2 * 2)
    return levels


def _readers(written: fx.Node) -> set[fx.Node]:
    """The calls that read a tensor's memory, themselves or through views of it."""
    views = reached([written], lambda n: [u for u in n.users if u.op == "call_function" and _is_view(u)])
    return {user for view in views for user in view.users}


def _with_sizes(gm: fx.GraphModule, own: Sequence[fx.Node]) -> list[fx.Node]:
    """Calls, and the arithmetic on sizes that they need, in the graph's order."""
    sizes = reached(
        [n for node in own for n in node.all_input_nodes if is_size(n)],
        lambda node: node.all_input_nodes,
    )
    needed = {*own, *(node for node in sizes if node.op == "call_function")}
    return [node for node in gm.graph.nodes if node in needed]


def _read_ends_of_joins(gm: fx.GraphModule) -> None:
    """What computes from the last columns of a join reads the part that they came from."""
    for node in [n for n in gm.graph.nodes if n.target in (aten.slice.Tensor, aten.select.int)]:
        joined, dim, start, *_ = (*arguments(node), 0, 0)
        if not isinstance(joined, fx.Node) or joined.target is not aten.cat.default:
            continue
        last, along = arguments(joined)[0][-1], (*arguments(joined), 0)[1]
        rank, size = len(spec_of(joined).shape), spec_of(last).shape[dim]
        readers = [u for u in node.users if isinstance(u.target, OpOverload) and facts(u.target).pointwise]
        inside = isinstance(start, int) and isinstance(size, int) and -size <= start < 0
        if (
            not readers
            or not inside
            or dim % rank != along % rank
            or spec_of(last).dtype != spec_of(node).dtype
        ):
            continue
        with gm.graph.inserting_before(node):
            end = call(gm.graph, overload(node), last, *node.args[1:])
        if equal(spec_of(end).shape, spec_of(node).shape):
            for user in readers:
                user.replace_input_with(node, end)
    for node in reversed(gm.graph.nodes):
        if not node.users and _is_view(node):
            gm.graph.erase_node(node)


def _lay_out_columns(gm: fx.GraphModule) -> None:
    """Copy views of a fixed shape whose strides change, as a column of rows that grow, for their readers. A
    single element, as a sequence's last token, has any strides.
    """
    for node in gm.graph.nodes:
        spec = node.meta.get("val")
        if node.op != "call_function" or not _is_view(node) or not isinstance(spec, TensorSpec):
            continue
        others = [u for u in node.users if u.op == "call_function" and not _is_view(u) and not writes(u)]
        if spec.is_contiguous:
            readers = [u for u in others if not _is_symbolic(u)]  # else their strides follow the view's
        else:
            readers = [u for u in others if u.target is not aten.clone.default]
        if not spec.is_symbolic or is_symbolic(spec.shape) or not readers:
            continue
        with gm.graph.inserting_after(node):
            if spec.is_contiguous:
                column = call(gm.graph, aten.view.default, node, list(spec.shape))
                column.meta["val"] = TensorSpec.dense(spec.shape, spec.dtype, spec.device)
            else:
                column = call(gm.graph, aten.clone.default, node, memory_format=torch.contiguous_format)
        for user in readers:
            user.replace_input_with(node, column)
