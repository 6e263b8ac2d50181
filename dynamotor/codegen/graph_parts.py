"""Some calls of a graph as a graph of their own, and a call that runs several such parts in order.

>>> first, second = part_of(gm, nodes[:3], [nodes[2]]), part_of(gm, nodes[3:], [nodes[-1]])
>>> run = Chain(placeholders, results, [(compiled_first, first), (compiled_second, second)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph.module import copied, graph_module
from ..runtime.cuda_graphs import are_same

Compiled = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Part:
    """A graph of some calls; its inputs and outputs are nodes of the whole graph."""

    gm: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]


def inputs_of(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes of other parts that these calls and outputs read, in the order of their first use."""
    own = set(nodes)
    read = [n for node in nodes for n in node.all_input_nodes] + list(outputs)
    return [n for n in dict.fromkeys(read) if n not in own]


def part_of(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    outputs: list[fx.Node],
    inputs: list[fx.Node] | None = None,
) -> Part:
    """The part of these calls, in the graph's order. inputs: all nodes of other parts that they read."""
    inputs = inputs_of(nodes, outputs) if inputs is None else inputs
    graph = fx.Graph()
    made = copied(graph, inputs, nodes)
    graph.output([made[node] for node in outputs])
    part = graph_module(graph, "Part", gm)
    part.meta = dict(gm.meta)
    return Part(part, inputs, outputs)


class Chain:
    """The call of a whole graph: each part takes its inputs from the call's arguments and earlier parts.

    pure: how many parts come before the first effect, and run op by op.
    """

    def __init__(
        self,
        placeholders: Sequence[fx.Node],
        results: Sequence[Any],
        steps: Sequence[tuple[Compiled, Part]],
        pure: int = 0,
    ) -> None:
        places = {node: i for i, node in enumerate(placeholders)}
        for _, part in steps:
            for node in part.outputs:
                places[node] = len(places)
        self._rows = [(call, [places[node] for node in part.inputs]) for call, part in steps]
        self._shown = [(places[r], None) if isinstance(r, fx.Node) else (None, r) for r in results]
        self._pure = pure
        self._begun: tuple[tuple[Any, ...], list[Any]] | None = None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        begun, self._begun = self._begun, None
        if begun is not None and are_same(begun[0], inputs):
            values, rows = begun[1], self._rows[self._pure :]
        else:
            values, rows = list(inputs), self._rows
        for call, taken in rows:
            values += call(*[values[i] for i in taken])
        return tuple([constant if i is None else values[i] for i, constant in self._shown])

    def begin(self, *inputs: Any) -> Callable[[], None]:
        """Do the steps without effect of a call that is likely to come next with these very inputs; gives the
        function that forgets them.
        """
        values = list(inputs)
        for call, taken in self._rows[: self._pure]:
            values += call(*[values[i] for i in taken])
        forget = None
        for call, taken in self._rows[self._pure : self._pure + 1]:
            begin = getattr(call, "begin", None)
            forget = begin(*[values[i] for i in taken]) if begin is not None else None
        begun = self._begun = inputs, values

        def forget_all() -> None:
            if self._begun is begun:  # not the call after it
                self._begun = None
            if forget is not None:
                forget()

        return forget_all
