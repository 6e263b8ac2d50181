"""Cuts a captured graph into stages at DDP's bucket borders, each with a forward and backward of its own.

DDP's hooks fire when a stage's backward ends, so that a bucket is reduced while earlier stages still compute.

>>> stages = cut(gm, inputs, parameters, caps, backend)       # a callable like the graph's, or None: one stage is enough
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.spec import TensorSpec

Compiled = Callable[..., Any]
Backend = Callable[[fx.GraphModule, list[torch.Tensor]], Compiled]
_REGIONS_OPEN = (torch.amp.autocast_mode._enter_autocast,)
_REGIONS_CLOSE = (torch.amp.autocast_mode._exit_autocast,)
# Calls whose result shows their first argument's memory, by name: a write through them is a write to it.
_VIEWS = {
    "T", "contiguous", "detach", "diagonal", "expand", "flatten", "getitem", "mT", "movedim", "narrow", "permute", "reshape",
    "select", "squeeze", "swapaxes", "t", "transpose", "unflatten", "unsqueeze", "view", "view_as",
}
_WRITING_OPERATORS = {
    "iadd", "iand", "ifloordiv", "imod", "imul", "ior", "ipow", "isub", "itruediv", "ixor", "setitem",
}


def cut(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], caps: Sequence[int],
        backend: Backend) -> Compiled | None:
    """The graph as stages; None when its parameters fill one bucket at most, or when no place to cut is found."""
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    borders = stage_borders(gm, calls, inputs, parameters, caps)
    if not borders:
        return None
    parts = [calls[a:b] for a, b in zip((0, *borders), (*borders, len(calls)), strict=True)]
    return StagedCall(gm, parts, backend)


def first_uses(gm: fx.GraphModule, calls: Sequence[fx.Node], inputs: Sequence[torch.Tensor],
               parameters: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """Position in `calls` -> parameters first used there: their gradients are complete when that call's backward is."""
    wanted = {id(p): p for p in parameters}
    position = {node: i for i, node in enumerate(calls)}
    found: dict[int, list[torch.Tensor]] = {}
    for node, tensor in zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=True):
        used = [position[user] for user in node.users if user in position]
        if id(tensor) in wanted and used:
            found.setdefault(min(used), []).append(tensor)
    return found


def stage_borders(gm: fx.GraphModule, calls: Sequence[fx.Node], inputs: Sequence[torch.Tensor],
                  parameters: Sequence[torch.Tensor], caps: Sequence[int]) -> list[int]:
    """Where stages begin (positions in `calls`, without 0): walking back from the loss, a stage holds one bucket's parameters."""
    uses = first_uses(gm, calls, inputs, parameters)
    if not uses:
        return []
    plain = [a and b for a, b in zip(_outside_of_regions(calls), _between_values(calls), strict=True)]
    first = min(uses)
    borders: list[int] = []
    nbytes = 0
    for at in range(len(calls) - 1, first, -1):
        nbytes += sum(p.nbytes for p in uses.get(at, ()))
        if plain[at] and nbytes >= caps[min(len(borders), len(caps) - 1)]:
            borders.append(at)
            nbytes = 0
    return borders[::-1]


def _outside_of_regions(calls: Sequence[fx.Node]) -> list[bool]:
    """Whether a stage may begin before each call: outside of autocast regions, with gradients on."""
    depth, graded, result = 0, True, []
    for node in calls:
        result.append(depth == 0 and graded)
        if node.target in _REGIONS_OPEN:
            depth += 1
        elif node.target in _REGIONS_CLOSE:
            depth -= 1
        elif node.target is torch._C._set_grad_enabled:
            graded = bool(node.args[0])
    return result


def _between_values(calls: Sequence[fx.Node]) -> list[bool]:
    """Whether a stage may begin before each call: only tensors pass, and none that is written later on."""
    position = {node: i for i, node in enumerate(calls)}
    free = [True] * len(calls)
    for i, node in enumerate(calls):
        if not isinstance(node.meta.get("val"), TensorSpec):
            begin, end = i, max((position.get(user, i) for user in node.users), default=i)
        elif _writes(node) and node.args and isinstance(node.args[0], fx.Node) and _root(node.args[0]) in position:
            begin, end = position[_root(node.args[0])], i
        else:
            continue
        free[begin + 1:end + 1] = [False] * (end - begin)
    return free


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _writes(node: fx.Node) -> bool:
    """Whether the call changes its first argument."""
    name = _name(node)
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITING_OPERATORS or bool(node.kwargs.get("inplace"))


def _root(node: fx.Node) -> fx.Node:
    """The call whose memory a chain of views shows."""
    while _name(node) in _VIEWS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


@dataclass
class _Stage:
    """A part of the graph: which values it takes and gives (numbers in the run's list of values)."""

    gm: fx.GraphModule
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    drops: tuple[int, ...]
    call: Compiled | None = None


class StagedCall:
    """Runs the stages one after the other; each is compiled at its first run, for the tensors that arrive there."""

    def __init__(self, gm: fx.GraphModule, parts: Sequence[Sequence[fx.Node]], backend: Backend) -> None:
        self.backend = backend
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        static = gm.meta.get("static_inputs", frozenset())
        numbers: dict[fx.Node, int] = {node: i for i, node in enumerate(placeholders)}
        self.static = {numbers[node] for i, node in enumerate(placeholders) if i in static}
        stage_of = {node: i for i, part in enumerate(parts) for node in part}
        last: dict[fx.Node, int] = {}  # the last stage that takes a value; values that are returned stay
        for node, i in stage_of.items():
            for arg in node.all_input_nodes:
                last[arg] = max(last.get(arg, 0), i)
        last |= {node: len(parts) for node in output.all_input_nodes}
        self.stages = [self._stage(i, part, numbers, stage_of, last) for i, part in enumerate(parts)]
        self.result = tuple(numbers[node] for node in output.args[0])
        self.count = len(numbers)

    def _stage(self, i: int, part: Sequence[fx.Node], numbers: dict[fx.Node, int], stage_of: dict[fx.Node, int],
               last: dict[fx.Node, int]) -> _Stage:
        inside = set(part)
        takes = list(dict.fromkeys(arg for node in part for arg in node.all_input_nodes if arg not in inside))
        gives = [node for node in part if last.get(node, i) > i]
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in takes:
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        for node in part:
            env[node] = graph.node_copy(node, env.__getitem__)
        result = graph.output(tuple(env[node] for node in gives))
        result.meta["val"] = tuple(node.meta.get("val") for node in gives)
        for node in gives:
            numbers[node] = len(numbers)
        stage = fx.GraphModule(torch.nn.Module(), graph, class_name=f"Stage{i}")
        stage.meta["static_inputs"] = frozenset(k for k, node in enumerate(takes) if numbers[node] in self.static)
        drops = tuple(numbers[node] for node in takes if last[node] == i)
        return _Stage(stage, tuple(numbers[n] for n in takes), tuple(numbers[n] for n in gives), drops)

    def __call__(self, *inputs: torch.Tensor) -> tuple:
        values: list[Any] = [*inputs, *[None] * (self.count - len(inputs))]
        for stage in self.stages:
            arguments = [values[i] for i in stage.takes]
            if stage.call is None:
                stage.call = self.backend(stage.gm, arguments)
            for i in stage.drops:
                values[i] = None
            for i, value in zip(stage.gives, stage.call(*arguments), strict=True):
                values[i] = value
        return tuple([values[i] for i in self.result])
