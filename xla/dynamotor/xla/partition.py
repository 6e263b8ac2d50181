"""Cuts an aten graph around calls that the XLA device cannot record, before anything runs.

The graph is recorded once on leaves without data; a node that would fall back to the CPU, or whose result
lives on another device, ends a piece and is run by the lazy device between two executables.

>>> [piece.reason for piece in partition(gm, record_graph(gm, device).reasons)]
['', 'aten.nonzero.default: its result depends on data', '']
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dynamotor.extension_api import TensorSpec, copied, graph_module, writes

from . import device as devices, layout
from .ir import Cut, Lane, Meta
from .tensor import Alias, XLATensor, is_xla, wrap


@dataclass
class Piece:
    """A part of a graph: XLA's when `reason` is empty, else one node that runs on the lazy device. Values are
    named by their fx nodes."""

    gm: torch.fx.GraphModule
    inputs: list[torch.fx.Node]
    outputs: list[torch.fx.Node]
    reason: str = ""


@dataclass(frozen=True)
class OnHost:
    """An output of a graph that is its index-th placeholder, a CPU tensor."""

    index: int


def device_of(gm: torch.fx.GraphModule) -> torch.device | None:
    """The first xla device of a graph; None when it has no xla tensors."""
    for node in gm.graph.nodes:
        for spec in _specs(node):
            if spec.device.type == "xla":
                return torch.device("xla", spec.device.index or 0)
    return None


def _specs(node: torch.fx.Node) -> list[TensorSpec]:
    val = node.meta.get("val")
    return [
        spec for spec in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(spec, TensorSpec)
    ]


def leaf(lane: Lane, spec: TensorSpec) -> XLATensor:
    """A tensor that stands for an input of the graph that is being recorded."""
    node = lane.leaf(None, Meta.of(spec.shape, spec.dtype))
    return wrap(Alias(node, stride=layout.short(spec), offset=spec.offset))


class Recording:
    """Runs fx nodes on a lane of its own; `values` holds each node's result, `results` the graph's,
    `reasons` why a node could not be recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self.lane = Lane(device, recording=True)
        self.values: dict[torch.fx.Node, Any] = {}
        self.reasons: dict[torch.fx.Node, str] = {}
        self.leaves: list[Any] = []  # the inputs, by placeholder: tensors and numbers
        self.results: list[Any] = []
        self.first: list[Any] = []  # the leaf node of each placeholder (None for one that is not a tensor)

    def placeholder(self, node: torch.fx.Node) -> None:
        """Make the leaf of a placeholder (None for one that is not a tensor)."""
        val = node.meta.get("val")
        self.values[node] = given = leaf(self.lane, val) if isinstance(val, TensorSpec) else val
        self.leaves.append(given)
        self.first.append(given._alias.node if is_xla(given) else None)

    def result(self, output: Any) -> Any:
        """The value of one of the graph's outputs."""
        if not isinstance(output, torch.fx.Node):
            return output
        spec = output.meta.get("val")
        if output.op == "placeholder" and isinstance(spec, TensorSpec) and spec.device.type == "cpu":
            return OnHost(list(self.values).index(output))  # placeholders come first
        return self.values[output]

    def run(self, node: torch.fx.Node) -> None:
        """Record one node. Raises `Cut` when it cannot be recorded."""
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        with devices.using_lane(self.lane), torch.no_grad():
            assert callable(node.target)  # no method is called
            self.values[node] = node.target(*args, **kwargs)


def record_graph(gm: torch.fx.GraphModule, device: torch.device) -> Recording:
    """Record a whole graph, as far as it can be."""
    recording = Recording(device)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            recording.placeholder(node)
        elif node.op == "output":
            recording.results = [recording.result(a) for a in node.args[0]]
        elif reason := _record_or_reason(recording, node):
            recording.reasons[node] = reason
    return recording


def partition(gm: torch.fx.GraphModule, reasons: dict[torch.fx.Node, str]) -> list[Piece]:
    """The pieces of a graph in order, cut at the nodes that cannot be recorded."""
    groups: list[tuple[list[torch.fx.Node], str]] = [([], "")]
    for node in gm.graph.nodes:
        if node in reasons:
            groups += [([node], reasons[node]), ([], "")]
        elif node.op not in ("placeholder", "output"):
            groups[-1][0].append(node)
    return [_piece(gm, nodes, reason) for nodes, reason in groups if nodes]


def _record_or_reason(recording: Recording, node: torch.fx.Node) -> str:
    """Record a node, or say why it cannot be; later nodes then see leaves in the place of its results."""
    specs = _specs(node)
    elsewhere = [spec for spec in specs if spec.device.type != "xla"]
    if elsewhere:
        reason = f"{node.target}: its result is on {elsewhere[0].device}"
    elif not specs and node.op == "call_function" and not writes(node):
        reason = f"{node.target}: its result is not a tensor"
    else:
        try:
            recording.run(node)
            return ""
        except Cut as cut:
            reason = f"{node.target}: {cut}"
    val = node.meta.get("val")
    made = [
        leaf(recording.lane, spec) if isinstance(spec, TensorSpec) else spec
        for spec in (val if isinstance(val, (tuple, list)) else (val,))
    ]
    recording.values[node] = tuple(made) if isinstance(val, (tuple, list)) else made[0]
    return reason


def _piece(gm: torch.fx.GraphModule, nodes: list[torch.fx.Node], reason: str) -> Piece:
    """The nodes as a graph of their own: inputs are the values they read from outside, outputs those read
    of them
    later.
    """
    inside = set(nodes)
    inputs = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = torch.fx.Graph()
    copies = copied(graph, inputs, nodes)
    graph.output(tuple(copies[node] for node in outputs))
    return Piece(graph_module(graph, "Piece"), inputs, outputs, reason)
