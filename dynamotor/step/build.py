"""From a traced step to what runs: numbers go to the host, the rest becomes one graph with its writes at the
end.

>>> step = build_step(traced, example_inputs, compile_graph, "step0")
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..autograd.aot import CompileGraph, _compile
from ..autograd.extract import extract
from ..autograd.recipe import Recipe
from ..autograd.runtime import rebuilder
from ..autograd.simplify import PASSES, has_effect
from ..graph.info import GraphInfo
from ..graph.module import graph_module
from ..graph.passes import run_passes
from ..graph.spec import TensorSpec
from . import host
from .numbers import Question
from .trace import NotWhole, Path, Traced

aten = torch.ops.aten
_names = itertools.count()
NUMBER_STEP = 2  # elements from one number to the next: pointers to multiples of 16 bytes take the quicker code on a GPU


@dataclass(frozen=True)
class StepProgram:
    """A compiled step and how to call it: `compiled(*graph inputs, *parameters, *tensors, *constants,
    *numbers)`.

    numbers: the 0-d tensors in `room` in which the program finds them. reads, writes: numbers by path, and
    `values` makes the new ones (those for `numbers`, then those for `writes`) of what was read. The results
    are `n_values` values of the captured graph, gradients by input (`grads`), and whether a scaled gradient
    overflowed.
    """

    compiled: Callable[..., tuple]
    n_values: int
    rebuild: Callable[[Sequence, Sequence], tuple] | None
    parameters: tuple[int, ...]
    tensors: tuple[Path, ...]
    constants: tuple[torch.Tensor, ...]
    reads: tuple[Path, ...]
    writes: tuple[Path, ...]
    values: Callable[[list[float]], list[float] | None]
    room: torch.Tensor
    numbers: tuple[torch.Tensor, ...]
    grads: tuple[int, ...]
    owned: frozenset[int]
    scaled: bool
    device: torch.device


def build_step(
    traced: Traced, compile_graph: CompileGraph, static: frozenset[int], device: torch.device
) -> StepProgram:
    """Compile a traced step. `static`: the captured graph's inputs that are the same tensors at each call."""
    graph, leaves = traced.recorder.graph, traced.leaves
    questions = list(traced.recorder.questions.items())
    places, paths, kept = list(traced.contents), list(traced.numbers), list(traced.grads)
    asked = [(q.left, q.right) for q, _ in questions]
    graph.output(
        (
            [*traced.values],
            [traced.contents[p] for p in places],
            [traced.grads[i] for i in kept],
            [traced.numbers[p] for p in paths],
            [side for pair in asked for side in pair],
            [traced.found],
        )
    )
    gm = graph_module(graph, "Step")
    run_passes(gm, PASSES, stage="joint")
    output = next(iter(reversed(graph.nodes)))
    values, contents, grads, numbers, sides, (found,) = output.args[0]
    new = dict(zip(places, contents, strict=True))
    questions = [
        (Question(q.kind, *sides[2 * k : 2 * k + 2]), answer) for k, (q, answer) in enumerate(questions)
    ]

    known = traced.recorder.known  # of tensors on a GPU under a scaler nothing is
    by_node = {
        node: path
        for path, node in (*leaves.numbers.items(), *leaves.tensors.items())
        if known.get(node) is not None
    }
    on_host = host.on_host(graph, list(by_node), new)
    for node in [*numbers, *(side for side in sides if isinstance(side, fx.Node))]:
        if node not in on_host:
            raise NotWhole(
                "DM506",
                "the optimizer branches on, or keeps in Python, a number that only the step will know",
            )
    host_writes = [(by_node[place], node) for place, node in new.items() if place in on_host]
    host_writes += zip(paths, numbers, strict=True)
    host_writes.sort(
        key=lambda write: (
            write[0] in leaves.tensors and leaves.tensors[write[0]].meta["val"].device.type != "cpu"
        )
    )
    crossing = _cross(graph, on_host, output, [*values, *grads], device)
    nodes = [node for node in graph.nodes if node in on_host and node.op == "call_function"]
    reads = [node for node in graph.nodes if node in on_host and node.op == "placeholder"]
    wanted = [*crossing.nodes, *(node for _, node in host_writes)]
    program = host.HostProgram.of(nodes, reads, wanted, questions)

    constants = traced.recorder.constants
    tensors = {node: path for path, node in leaves.tensors.items() if node not in on_host}
    inputs = [
        *traced.placeholders,
        *(node for _, node in traced.parameters),
        *tensors,
        *(node for node, _ in constants),
        *crossing.placeholders,
    ]
    if found is not None:
        new.update(
            _skipping(
                graph, output, found, {place: new[place] for place in traced.skipped if place not in on_host}
            )
        )
    results = [
        *(crossing.of(v) for v in values),
        *(crossing.of(g) for g in grads),
        *([] if found is None else [found]),
    ]
    writes = [
        (place, crossing.of(node))
        for place, node in new.items()
        if place not in on_host and place is not node
    ]
    keep = [node for node in graph.nodes if node.op == "call_function" and has_effect(node)]
    main = extract(graph, inputs, results, writes=writes, keep=keep)
    name = f"step{next(_names)}"
    held = {node for path, node in leaves.tensors.items() if path[0] == "grad"}
    fixed = frozenset(
        i
        for i, node in enumerate(inputs)
        if node not in held and (i >= len(traced.placeholders) or i in static)
    )
    room = torch.zeros((len(crossing.nodes), NUMBER_STEP), dtype=torch.float64, device=device)
    compiled = _compile(main, GraphInfo("forward", name, fixed, len(results)), compile_graph)
    recipe = Recipe(len(inputs), (), {}, tuple(traced.plans), len(values), (), ())
    return StepProgram(
        compiled,
        len(values),
        rebuilder(recipe),
        tuple(k for k, _ in traced.parameters),
        tuple(tensors.values()),
        tuple(t for _, t in constants),
        tuple(by_node[node] for node in reads),
        tuple(path for path, _ in host_writes),
        program.code,
        room,
        tuple(room[:, 0].unbind()),
        tuple(kept),
        traced.owned,
        found is not None,
        device,
    )


def _skipping(
    graph: fx.Graph, output: fx.Node, found: fx.Node, contents: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The contents, or what was there where gradients overflowed."""
    chosen = {}
    with graph.inserting_before(output):
        for place, node in contents.items():
            chosen[place] = graph.call_function(aten.where.self, (found, place, node))
            chosen[place].meta = dict(node.meta, val=place.meta["val"])
    return chosen


@dataclass
class _Crossing:
    """Host numbers that the program reads, its inputs for them, and what stands for each in it."""

    placeholders: list[fx.Node]
    stands: dict[fx.Node, fx.Node]

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.stands)

    def of(self, node: fx.Node) -> fx.Node:
        return self.stands.get(node, node)


def _cross(
    graph: fx.Graph, on_host: set[fx.Node], output: fx.Node, results: Sequence[fx.Node], device: torch.device
) -> _Crossing:
    """Let the rest of the graph read host numbers from inputs on its device: one each, so that equal kernels
    stay equal.
    """
    varying: set[fx.Node] = set()
    for node in graph.nodes:
        if node in on_host and (
            node.op == "placeholder" or any(arg in varying for arg in node.all_input_nodes)
        ):
            varying.add(node)
    read = [
        node
        for node in graph.nodes
        if node in varying
        and (node in results or any(user not in on_host and user is not output for user in node.users))
    ]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    crossing = _Crossing([], {})
    for _ in read:
        with graph.inserting_after(last):
            last = graph.placeholder("number")
            last.target = last.name
            last.meta["val"] = TensorSpec.dense((), torch.float64, device=device)
        crossing.placeholders.append(last)
    for place, node in zip(crossing.placeholders, read, strict=True):
        stand, dtype = place, node.meta["val"].dtype
        if dtype is not torch.float64:
            with graph.inserting_after(last):
                stand = graph.call_function(aten._to_copy.default, (place,), {"dtype": dtype})
                stand.meta["val"] = TensorSpec.dense((), dtype, device=device)
        crossing.stands[node] = stand
        node.replace_all_uses_with(
            stand, delete_user_cb=lambda user: user not in on_host and user is not output
        )
    return crossing
