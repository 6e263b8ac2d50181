"""A torch graph in stages: parts of its calls, each a graph of its own that is compiled (or not) apart from
the others.

>>> call = StagedCall(gm, [(calls[:3], compiled), (calls[3:], lambda stage, inputs: stage.forward)])
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..base import compat
from ..base.config import config
from ..base.events import emit
from ..base.narrowing import checked
from ..graph.error_lines import show_its_line
from ..graph.module import copied
from ..graph.size_nodes import is_size
from ..graph.sizes import Size, Symbol, equal
from ..graph.spec import Backend, Compiled, TensorSpec, contiguous_stride
from ..graph.states import enter_inference, leave_inference
from ..graph.tensor_subclass import WrapperSpec
from .variants import Variants

Part = tuple[Sequence[fx.Node], Backend | None]  # None: PyTorch runs it as it is


def symbol_nodes(gm: fx.GraphModule) -> dict[Symbol, fx.Node]:
    """The node that gives each symbol's value at a call: a placeholder, or what reads a size of data."""
    found: dict[Symbol, fx.Node] = {}
    for node in gm.graph.nodes:
        if is_size(node) and len(node.meta["val"].terms) == 1:
            (monomial,) = node.meta["val"].terms
            if len(monomial) == 1 and type(monomial[0]) is Symbol:
                found.setdefault(monomial[0], node)
    return found


def _symbols(val: Any) -> list[Symbol]:
    """The symbols of a value's spec, in the order in which they were made."""
    sizes: Sequence[Any] = (val,)
    if type(val) is TensorSpec:
        sizes = (*val.shape, *val.stride, val.offset)
    elif type(val) is WrapperSpec:
        sizes = val.sizes()
    found = {symbol for size in sizes if type(size) is Size for symbol in size.symbols}
    return sorted(found, key=lambda symbol: symbol.order)


@dataclass
class _Stage:
    """A part of the graph: which values it takes and gives (numbers in the run's list of values)."""

    gm: fx.GraphModule
    backend: Backend | None
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
        self.around: list[tuple[bool, bool]] = []  # the same for the code around inference mode

    def enter(self, graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> None:
        for region in self.regions:
            env[region] = graph.node_copy(region)
        self._set_grad(graph, self.outside, self.graded)

    def leave(self, graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> None:
        for region in reversed(self.regions):
            graph.call_function(compat.exit_autocast, (env[region],))
        self._set_grad(graph, self.graded, self.outside)

    def follow(self, node: fx.Node) -> None:
        """Note a call's effect on the modes."""
        if node.target is compat.set_grad_enabled:
            self.graded = bool(node.args[0])
        elif node.target is enter_inference:
            self.around.append((self.outside, self.graded))
            self.outside = self.graded = not node.args[0]
        elif node.target is leave_inference:
            self.outside, self.graded = self.around.pop()
        elif node.target is compat.enter_autocast:
            self.regions.append(node)
        elif node.target is compat.exit_autocast:
            self.regions.remove(checked(fx.Node, node.args[0]))

    @staticmethod
    def _set_grad(graph: fx.Graph, before: bool, after: bool) -> None:
        if before != after:
            graph.call_function(compat.set_grad_enabled, (after,))


class StagedCall:
    """Runs the stages one after the other; each is compiled at its first run, for the tensors that arrive
    there.
    """

    def __init__(self, gm: fx.GraphModule, parts: Sequence[Part]) -> None:
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        static = gm.meta.get("static_inputs", frozenset())
        numbers: dict[fx.Node, int] = {node: i for i, node in enumerate(placeholders)}
        self.symbols, self.env = symbol_nodes(gm), gm.meta.get("shape_env")
        self.static = {numbers[node] for i, node in enumerate(placeholders) if i in static}
        last: dict[fx.Node, int] = {}  # the last stage that takes a value; values that are returned stay
        parts = [([n for n in calls if not self._follows(n)], backend) for calls, backend in parts]
        for i, (calls, _) in enumerate(parts):
            last |= dict.fromkeys(self._takes(calls), i)
        last |= dict.fromkeys(output.all_input_nodes, len(parts))
        modes = _Modes()
        self.stages = [self._stage(i, part, numbers, last, modes) for i, part in enumerate(parts)]
        self.result = tuple(numbers[node] for node in output.args[0])
        self.count = len(numbers)
        self.compiling = threading.Lock()
        self.compile = config.bound(_call, "strict")  # `fullgraph` is about captures: a part may run as it is
        emit("late", waits="parts of a graph around what eager PyTorch runs are compiled when they first run")

    def _stage(
        self, i: int, part: Part, numbers: dict[fx.Node, int], last: dict[fx.Node, int], modes: _Modes
    ) -> _Stage:
        calls, backend = part
        takes = self._takes(calls)
        gives = [node for node in calls if last.get(node, i) > i and node.target is not compat.enter_autocast]
        graph = fx.Graph()
        env = copied(graph, takes, ())
        modes.enter(graph, env)
        for node in calls:
            for size in self._expression(node):
                if size not in env:
                    env[size] = graph.node_copy(size, env.__getitem__)
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
        if any(map(is_size, takes)):
            stage.meta["shape_env"] = self.env
        return _Stage(
            stage, backend, tuple(numbers[n] for n in takes), tuple(numbers[n] for n in gives), drops
        )

    def _follows(self, node: fx.Node) -> bool:
        """Whether a node computes a size from others: each part does that for itself."""
        return is_size(node) and node not in self.symbols.values()

    def _expression(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that compute the sizes among a call's arguments, in order."""
        found: list[fx.Node] = []
        for arg in node.all_input_nodes:
            if self._follows(arg):
                found += [*self._expression(arg), arg]
        return found

    def _takes(self, calls: Sequence[fx.Node]) -> list[fx.Node]:
        """The outside values that calls need: symbols (for computed sizes, and for tensors' specs),
        then tensors.
        """
        whole = [one for node in calls for one in (*self._expression(node), node)]
        inside = set(whole)
        args = dict.fromkeys(arg for node in whole for arg in node.all_input_nodes if arg not in inside)
        args = {node: None for node in args if node.target is not compat.enter_autocast}
        symbols = dict.fromkeys(self.symbols[s] for node in args for s in _symbols(node.meta.get("val")))
        return list(dict.fromkeys([*(node for node in symbols if node not in inside), *args]))

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        values: list[Any] = [*inputs, *[None] * (self.count - len(inputs))]
        for stage in self.stages:
            arguments = [values[i] for i in stage.takes]
            try:
                call = stage.call or self._compiled(stage, arguments)
                for i in stage.drops:
                    values[i] = None
                given = call(*arguments)
            except RuntimeError as error:  # of autograd: only here are the stage and its inputs known
                show_its_line(error, stage.gm, arguments)
                raise
            for i, value in zip(stage.gives, given, strict=True):
                values[i] = value
        return tuple([values[i] for i in self.result])

    def _compiled(self, stage: _Stage, arguments: list[torch.Tensor]) -> Compiled:
        with self.compiling:
            if stage.call is None:
                stage.call = self.compile(stage, arguments)
        return stage.call


def _call(stage: _Stage, arguments: list[Any]) -> Compiled:
    if stage.backend is None:
        return as_specified(stage.gm)
    general = "shape_env" in stage.gm.meta
    return Variants(stage.gm, stage.backend) if general else stage.backend(stage.gm, arguments)


def as_specified(gm: fx.GraphModule) -> Compiled:
    """The stage as PyTorch runs it; on a GPU, what data decides the size of lies as its rule says: the rules
    follow the CPU's kernels, and the next stages rely on them."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    turned = {
        i: _is_row_major(node.meta["val"])
        for i, node in enumerate(output.args[0])
        if node.meta.get("data_dependent")
        and type(node.meta["val"]) is TensorSpec
        and node.meta["val"].device.type == "cuda"
    }
    return gm.forward if not turned else lambda *inputs: _turned(list(gm.forward(*inputs)), turned)


def _is_row_major(spec: TensorSpec) -> bool:
    return equal(spec.stride, contiguous_stride(spec.shape))


def _turned(results: list[Any], row_major: dict[int, bool]) -> list[Any]:
    """Results as row-major ones, or (as `nonzero` gives them) column-major ones."""
    for i, rows in row_major.items():
        x = results[i]
        results[i] = x.contiguous() if rows else x.t().contiguous().t() if x.dim() == 2 else x
    return results
