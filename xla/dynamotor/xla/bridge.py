"""The bridge: captured graphs on xla tensors become XLA executables; calls record nothing.

`trace_once` (backend "xla") records the graph once, on leaves that stand for its inputs, and keeps the
executable; a call gathers the arrays, runs, and wraps the results by a plan. `trace_everytime` records at
each call and lets the lazy device find its executable.

>>> fast = dynamotor.compile(model.to("xla"), backend="xla")
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from dynamotor.extension_api import (
    Compiled,
    GraphInfo,
    aot_compile,
    config,
    emit,
    timed,
    wrap_rule,
    wrap_tensor,
)

from . import (
    _C,
    device as devices,
    execute,
    metrics,
    placement,
    rng,
    start,  # noqa: F401  (registers the device)
    sync,
    transfer,
)
from .buckets import Bucketed
from .checks import raise_failed
from .ir import Cut, Lane, Meta, Node, lock
from .layout import Stride, preserved
from .partition import OnHost, Piece, Recording, device_of, partition, record_graph
from .recent import Recent
from .tensor import Alias, XLATensor, maker, new_root, value, wrap, write

# To the capture an xla tensor is a plain tensor.
wrap_rule(XLATensor)(wrap_tensor)


def trace_once(gm: torch.fx.GraphModule, example_inputs: Sequence[XLATensor]) -> Compiled:
    """Backend "xla": forward and backward graphs as XLA executables, recorded once."""
    return _compile(
        gm, example_inputs, functools.partial(compile_padded, pad=config.pad) if config.pad else compile_once
    )


trace_once.__dict__["pads"] = True  # it takes symbols for sizes under `config.pad`


def trace_everytime(gm: torch.fx.GraphModule, example_inputs: Sequence[XLATensor]) -> Compiled:
    """Backend "xla_trace_everytime": the same graphs, recorded on the lazy device at each call and flushed at
    its end.
    """
    return _compile(gm, example_inputs, compile_everytime)


def extract_compiled_graph(xla_model: torch.fx.GraphModule, xla_args: Sequence[XLATensor]) -> Compiled:
    """torch_xla's name: an executable for a graph module and arguments like these."""
    return trace_once(xla_model, xla_args)


def trivial(gm: torch.fx.GraphModule, example_inputs: Sequence[XLATensor]) -> Compiled:
    """Backend "torchxla_trivial": the captured operations on the lazy device, which runs them at the
    program's barriers.
    """
    return gm.forward


def _compile(
    gm: torch.fx.GraphModule, example_inputs: Sequence[XLATensor], compile_graph: Callable
) -> Compiled:
    static = gm.meta.get("static_inputs", frozenset())
    return aot_compile(gm, list(example_inputs), compile_graph, static_inputs=static)


def compile_everytime(gm: torch.fx.GraphModule, info: GraphInfo) -> Compiled:
    """One aten graph, recorded anew by each call."""
    device = device_of(gm)

    def run(*inputs: torch.Tensor) -> tuple:
        with torch.no_grad():
            results = gm.forward(*inputs)
        if device is not None:
            sync.flush(devices.lane_of(device), "bridge")
        return tuple(results)

    return run


def compile_once(gm: torch.fx.GraphModule, info: GraphInfo) -> Compiled:
    """One aten graph: an executable, or several with what only the CPU can run between them."""
    device = device_of(gm)
    if device is None or all(node.op in ("placeholder", "output") for node in gm.graph.nodes):
        return gm.forward
    with timed("xla bridge"):
        recording = record_graph(gm, device)
    if not recording.reasons:
        return program_of(recording)
    pieces = partition(gm, recording.reasons)
    emit("xla.partition", name=info.name, pieces=len(pieces), reasons=list(recording.reasons.values()))
    return _chain(gm, pieces, device)


def compile_padded(gm: torch.fx.GraphModule, info: GraphInfo, pad: Any) -> Compiled:
    """One aten graph whose sizes may differ between calls: an executable for each bucket of sizes."""
    device = device_of(gm)
    if device is None or "shape_env" not in gm.meta:
        return compile_once(gm, info)
    return Bucketed(gm, lambda graph: compile_once(graph, info), pad, device, info.name)


@dataclass(frozen=True)
class Result:
    """A graph's output: the executable's index-th result, as a new tensor with these strides (None:
    row-major).
    """

    index: int
    meta: Meta
    stride: Stride
    device: torch.device

    def node(self, results: Sequence[jax.Array], inputs: Sequence[XLATensor]) -> Node:
        return Node(None, (), self.meta, devices.lane_of(self.device), results[self.index])

    def how(self) -> Any:
        """Where it is, the maker of its tensor, and the tensor's alias without data and lane."""
        model = Alias(Node(None, (), self.meta, devices.lane_of(self.device)), stride=self.stride)
        return self.index, maker(self.meta, self.stride, self.device), model


@dataclass(frozen=True)
class Input:
    """A graph's output on the device: the value of the call's index-th argument, which may be a CPU
    tensor."""

    index: int
    device: torch.device
    stride: Stride = None

    def node(self, results: Sequence[jax.Array], inputs: Sequence[torch.Tensor]) -> Node:
        given = inputs[self.index]
        if type(given) is XLATensor:
            return value(given._alias)
        return transfer.from_cpu(given, devices.lane_of(self.device))

    def how(self) -> Any:
        return lambda inputs: wrap(new_root(self.node((), inputs), self.stride))


@dataclass(frozen=True)
class Passed:
    """A graph's output that is the call's index-th argument itself, a CPU tensor."""

    index: int

    def how(self) -> Any:
        return operator.itemgetter(self.index)


@dataclass(frozen=True)
class Plain:
    """A graph's output that is not a tensor (None, a number), or a constant tensor."""

    value: Any

    def node(self, results: Sequence[jax.Array], inputs: Sequence[XLATensor]) -> Node:
        return value(self.value._alias)

    def how(self) -> Any:
        return lambda inputs: self.value


class Inputs:
    """Inputs of a program beside its arguments, and where these go. `first`: the leaf of each
    argument (None where it is no tensor)."""

    def __init__(self, lane: Lane, first: Sequence[Node | None]) -> None:
        argument = {node: index for index, node in enumerate(first) if node is not None}
        # Which argument each leaf is (-1: none, it is known already), and what each call begins with.
        self.order = tuple([argument.get(leaf, -1) for leaf in lane.leaves])
        self.arrays = [None if leaf in argument else leaf.data for leaf in lane.leaves]
        if lane.scalars:
            self.arrays.append(
                jax.device_put(execute.scalar_vector(lane.scalars), placement.home(lane.device))
            )
        moved = lane.draws or lane.after != lane.before
        self.draws = rng.Draws(lane.before or 0, lane.draws, lane.after or 0) if moved else None


class Program(_C.XlaCall):
    """A recorded graph as one executable. The input slots and the output plan are fixed; a call (csrc/
    xla_call.c) looks nothing up by tensor, and asks the methods below for rare cases.

    `first`: the leaf of each argument (None where it is no tensor); `results`: tensors or plain values;
    `updates`: (argument, new value) of values written in place; `donate`: the results may take the memory of
    the arguments that they replace.
    """

    def __init__(
        self,
        lane: Lane,
        first: Sequence[Node | None],
        results: Sequence[Any],
        updates: Sequence[tuple[int, Node]],
        donate: bool = False,
    ) -> None:
        self.device = lane.device
        argument = {node: index for index, node in enumerate(first) if node is not None}
        positions: dict[int, int] = {}

        def plan(node: Node, stride: Stride = None) -> Any:
            if node in argument:
                return Input(argument[node], self.device, stride)
            if node.data is not None:
                return Plain(
                    wrap(new_root(_shared(devices.lane_of(self.device).leaf(node.data, node.meta)), stride))
                )
            return Result(positions.setdefault(node.position, len(positions)), node.meta, stride, self.device)

        outputs = [
            plan(value(r._alias), preserved(r._alias))
            if type(r) is XLATensor
            else r
            if type(r) is Passed
            else Plain(r)
            for r in results
        ]
        super().__init__(self.device, tuple([output.how() for output in outputs]))
        self.updates = [(index, plan(node)) for index, node in updates]
        self.checks = lane.checks
        self.checked = [plan(check.bad.node).index for check in lane.checks]
        self.finishes = bool(self.checks or self.updates)
        inputs, written = Inputs(lane, first), {index for index, _ in updates} if donate else set()
        self.donated = tuple([position for position, index in enumerate(inputs.order) if index in written])
        self.graph = execute.Graph.of(lane, tuple(positions), self.donated)
        self.take(inputs)

    def take(self, inputs: Inputs) -> None:
        """What later calls pass beside their arguments."""
        self.draws = inputs.draws
        self.set_inputs(inputs.order, inputs.arrays, bool(self.donated or inputs.draws is not None))

    def read(self, tensor: torch.Tensor) -> jax.Array:
        """The array of an argument that holds none: pending work is flushed, a CPU tensor is copied."""
        if type(tensor) is XLATensor:
            return transfer.data_of(tensor, "bridge")
        return transfer.upload(tensor, placement.home(self.device))

    def complete(self, arrays: list[jax.Array], inputs: Sequence[XLATensor]) -> None:
        """Add the keys of the draws, and copy arrays that would be donated though something else holds
        them, or pending
        operations read it.
        """
        if self.draws is not None:
            keys = self.draws.take(self.device)
            arrays += [jax.device_put(keys, placement.home(self.device))] if len(keys) else []
        epoch = devices.lane_of(self.device).epoch
        for position in self.donated:
            leaf = value(inputs[self.order[position]]._alias)
            if leaf.owners != 1 or leaf.epoch == epoch:
                arrays[position] = jax.numpy.copy(arrays[position])

    def compile(self, arrays: list[jax.Array], inputs: Sequence[XLATensor]) -> None:
        """Compile it under PyTorch's present settings."""
        settings = placement.settings()
        if placement.spmd() is None:
            self.executable = execute.compile_graph(self.graph, arrays)
            start: Callable[[list[jax.Array]], list[jax.Array]] = self.executable.start
        else:
            start = _Spread(self.graph)
        self.set_start(start, settings)
        emit("xla.program", program=self, inputs=inputs)

    def finish(self, results: list[jax.Array], inputs: Sequence[XLATensor]) -> None:
        """Raise the errors that the graph found, and store its writes."""
        if self.checks:
            raise_failed(self.checks, [results[index] for index in self.checked])
        for index, update in self.updates:
            write(inputs[index]._alias, update.node(results, inputs))

    failed = staticmethod(execute.raise_coded)


_C.xla_setup(
    XLATensor,
    Alias,
    Node,
    lock,
    devices._lanes,
    devices.lane_of,
    placement.SETTINGS,
    metrics.timings,
)


class _Spread:
    """A graph in SPMD mode: an executable for each way in which its inputs are laid out over the mesh."""

    def __init__(self, graph: execute.Graph) -> None:
        self.graph = graph
        self._executables = Recent(64)

    def __call__(self, arrays: list[jax.Array]) -> list[jax.Array]:
        arrays = [placement.settle(array) for array in arrays]
        layout = placement.signature(arrays)
        executable = self._executables.get(layout)
        if executable is None:
            executable = self._executables[layout] = execute.compile_graph(self.graph, arrays)
        return executable.start(arrays)


def _shared(node: Node) -> Node:
    """A value with another holder: never donated."""
    node.owners += 1
    return node


def program_of(recording: Recording) -> Program:
    """The program of a graph that could be recorded as a whole."""
    for reason in recording.reasons.values():
        raise Cut(reason)
    emit("late", waits="XLA compiles a graph when it first runs")
    updates = [
        (index, tensor._alias.node)
        for index, tensor in enumerate(recording.leaves)
        if type(tensor) is XLATensor and tensor._alias.version
    ]
    results = [Passed(r.index) if type(r) is OnHost else r for r in recording.results]
    return Program(recording.lane, recording.first, results, updates)


def _chain(gm: torch.fx.GraphModule, pieces: list[Piece], device: torch.device) -> Compiled:
    """Pieces one after the other; those between executables run on the lazy device."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output").args[0]
    steps = [
        (program_of(record_graph(p.gm, device)) if not p.reason else p.gm.forward, p.inputs, p.outputs)
        for p in pieces
    ]

    def run(*inputs: torch.Tensor) -> tuple:
        values = dict(zip(placeholders, inputs))
        for step, wanted, given in steps:
            values.update(zip(given, step(*[values[node] for node in wanted])))
        return tuple([values[a] if isinstance(a, torch.fx.Node) else a for a in output])

    return run
