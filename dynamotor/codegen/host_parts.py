"""Splits a graph with tensors on a GPU and on the CPU: the host's calls before, the GPU's graph, the host's
calls after.

Models that drop layers draw `torch.rand([])` on the CPU beside each layer; without the split each such graph
would run on aten kernels as a whole. Single numbers that only the GPU's kernels read stay in its graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..graph.module import writes
from ..graph.size_nodes import is_size
from ..graph.spec import GraphInfo, TensorSpec
from .graph_parts import Chain, Compiled, Part, inputs_of, part_of


@dataclass(frozen=True)
class HostSplit:
    """The three parts of a graph, and the facts of the GPU's."""

    before: Part
    device: Part
    after: Part
    info: GraphInfo
    placeholders: list[fx.Node]
    results: Sequence[Any]

    def around(self, device_call: Compiled) -> Compiled:
        """The whole graph's call, given the call of the GPU's part."""
        calls = (
            (self.before, self.before.gm.forward),
            (self.device, device_call),
            (self.after, self.after.gm.forward),
        )
        steps = [(call, part) for part, call in calls if part.outputs or part is self.after]
        return Chain(self.placeholders, self.results, steps)


def split(gm: fx.GraphModule, info: GraphInfo) -> HostSplit | None:
    """The parts of a graph with tensors on both; None where the host's calls stand between the GPU's."""
    nodes = list(gm.graph.nodes)
    calls = [node for node in nodes if node.op == "call_function"]
    before = _before(calls)
    after = _after(calls, before)
    if after is None or not (before or after):
        return None
    device = [node for node in calls if node not in before and node not in after]
    if not any(_on_gpu(node) for node in device):
        return None
    placeholders = [node for node in nodes if node.op == "placeholder"]
    results = next(node for node in nodes if node.op == "output").args[0]
    wanted = {r for r in results if isinstance(r, fx.Node)}
    read_after = {n for node in after for n in node.all_input_nodes}
    given = [r for r in dict.fromkeys(results) if isinstance(r, fx.Node) and r in set(device)]
    given += [node for node in device if node in read_after and node not in wanted]
    taken = list(dict.fromkeys([*filter(_is_symbol, placeholders), *inputs_of(device, given)]))
    static = {placeholders[i] for i in info.static_inputs}
    leading = set(results[: info.n_outputs])
    facts = replace(
        info,
        static_inputs=frozenset(i for i, node in enumerate(taken) if node in static),
        n_outputs=sum(node in leading for node in given),
    )
    read = {n for node in (*device, *after) for n in node.all_input_nodes} | wanted
    return HostSplit(
        part_of(gm, [n for n in calls if n in before], [n for n in calls if n in before and n in read]),
        part_of(gm, device, given, taken),
        part_of(gm, [n for n in calls if n in after], [n for n in calls if n in after and n in wanted]),
        facts,
        placeholders,
        results,
    )


def _specs(node: fx.Node) -> list[TensorSpec]:
    val = node.meta.get("val")
    return [
        spec for spec in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(spec, TensorSpec)
    ]


def _on_cpu(node: fx.Node) -> bool:
    specs = _specs(node)
    return bool(specs) and all(spec.device.type == "cpu" for spec in specs)


def _on_gpu(node: fx.Node) -> bool:
    return any(spec.device.type != "cpu" for spec in _specs(node))


def _is_symbol(node: fx.Node) -> bool:
    return node.op == "placeholder" and is_size(node)


def _is_shown(node: fx.Node) -> bool:
    return any(user.op == "output" or writes(user) for user in node.users)


def _before(calls: Iterable[fx.Node]) -> set[fx.Node]:
    """The host's part: computations on CPU tensors alone, as far as results and copies to the GPU need it."""
    possible: set[fx.Node] = set()
    for node in calls:
        own = [n for n in node.all_input_nodes if not _is_symbol(n)]
        of_cpu = all(n in possible or n.op == "placeholder" and _on_cpu(n) for n in own)
        if of_cpu and not writes(node) and (_on_cpu(node) or own):
            possible.add(node)
    needed: set[fx.Node] = set()
    for node in reversed(list(calls)):
        is_copy = _on_gpu(node) and any(spec.shape for n in node.all_input_nodes for spec in _specs(n))
        if node in possible and (is_copy or _is_shown(node) or any(user in needed for user in node.users)):
            needed.add(node)
    return needed


def _after(calls: Iterable[fx.Node], before: set[fx.Node]) -> set[fx.Node] | None:
    """The host's work on values of the GPU; None where the GPU needs a result of that."""
    after: set[fx.Node] = set()
    for node in calls:
        if node in before:
            continue
        read = node.all_input_nodes
        reads = any(n in after for n in read)
        makes = _on_cpu(node) and (reads or any(_on_gpu(n) for n in read))
        if makes or writes(node) and bool(read) and _on_cpu(read[0]):
            if any(is_size(n) and not _is_symbol(n) for n in read):
                return None
            after.add(node)
        elif reads:
            return None
    return after
