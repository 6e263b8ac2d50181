"""A torch graph in stages: parts of its calls, each a graph of its own that is compiled (or not) apart from
the others.

>>> call = StagedCall(gm, [(calls[:3], compiled), (calls[3:], lambda stage, inputs: stage.forward)])
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

Compiled = Callable[..., Any]
Backend = Callable[[fx.GraphModule, list[torch.Tensor]], Compiled]
Part = tuple[Sequence[fx.Node], Backend]


@dataclass
class _Stage:
    """A part of the graph: which values it takes and gives (numbers in the run's list of values)."""

    gm: fx.GraphModule
    backend: Backend
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    drops: tuple[int, ...]
    call: Compiled | None = None


class _Modes:
    """Grad mode and the autocast regions that are open at a border: a stage enters them again, and leaves as
    it found them.
    """

    def __init__(self) -> None:
        self.outside = self.graded = torch.is_grad_enabled()
        self.regions: list[fx.Node] = []

    def enter(self, graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> None:
        for region in self.regions:
            env[region] = graph.node_copy(region)
        self._set_grad(graph, self.outside, self.graded)

    def leave(self, graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> None:
        for region in reversed(self.regions):
            graph.call_function(_exit_autocast, (env[region],))
        self._set_grad(graph, self.graded, self.outside)

    def follow(self, node: fx.Node) -> None:
        """Note what a call does to the modes."""
        if node.target is torch._C._set_grad_enabled:
            self.graded = bool(node.args[0])
        elif node.target is _enter_autocast:
            self.regions.append(node)
        elif node.target is _exit_autocast:
            self.regions.remove(node.args[0])  # type: ignore[arg-type]

    @staticmethod
    def _set_grad(graph: fx.Graph, before: bool, after: bool) -> None:
        if before != after:
            graph.call_function(torch._C._set_grad_enabled, (after,))


class StagedCall:
    """Runs the stages one after the other; each is compiled at its first run, for the tensors that arrive
    there.
    """

    def __init__(self, gm: fx.GraphModule, parts: Sequence[Part]) -> None:
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        static = gm.meta.get("static_inputs", frozenset())
        numbers: dict[fx.Node, int] = {node: i for i, node in enumerate(placeholders)}
        self.static = {numbers[node] for i, node in enumerate(placeholders) if i in static}
        last: dict[fx.Node, int] = {}  # the last stage that takes a value; values that are returned stay
        for i, (calls, _) in enumerate(parts):
            for node in calls:
                last |= dict.fromkeys(node.all_input_nodes, i)
        last |= dict.fromkeys(output.all_input_nodes, len(parts))
        modes = _Modes()
        self.stages = [self._stage(i, part, numbers, last, modes) for i, part in enumerate(parts)]
        self.result = tuple(numbers[node] for node in output.args[0])
        self.count = len(numbers)
        self.compiling = threading.Lock()

    def _stage(
        self, i: int, part: Part, numbers: dict[fx.Node, int], last: dict[fx.Node, int], modes: _Modes
    ) -> _Stage:
        calls, backend = part
        inside = {*calls, *modes.regions}
        takes = list(
            dict.fromkeys(arg for node in calls for arg in node.all_input_nodes if arg not in inside)
        )
        gives = [node for node in calls if last.get(node, i) > i and node.target is not _enter_autocast]
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in takes:
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        modes.enter(graph, env)
        for node in calls:
            env[node] = graph.node_copy(node, env.__getitem__)
            modes.follow(node)
        modes.leave(graph, env)
        result = graph.output(tuple(env[node] for node in gives))
        result.meta["val"] = tuple(node.meta.get("val") for node in gives)
        for node in gives:
            numbers[node] = len(numbers)
        stage = fx.GraphModule(torch.nn.Module(), graph, class_name=f"Stage{i}")
        stage.meta["static_inputs"] = frozenset(
            k for k, node in enumerate(takes) if numbers[node] in self.static
        )
        drops = tuple(numbers[node] for node in takes if last[node] == i)
        return _Stage(
            stage, backend, tuple(numbers[n] for n in takes), tuple(numbers[n] for n in gives), drops
        )

    def __call__(self, *inputs: torch.Tensor) -> tuple:
        values: list[Any] = [*inputs, *[None] * (self.count - len(inputs))]
        for stage in self.stages:
            arguments = [values[i] for i in stage.takes]
            call = stage.call or self._compiled(stage, arguments)
            for i in stage.drops:
                values[i] = None
            for i, value in zip(stage.gives, call(*arguments), strict=True):
                values[i] = value
        return tuple([values[i] for i in self.result])

    def _compiled(self, stage: _Stage, arguments: list[torch.Tensor]) -> Compiled:
        with self.compiling:
            if stage.call is None:
                stage.call = stage.backend(stage.gm, arguments)
        return stage.call
