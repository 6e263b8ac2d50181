"""From a traced step to what runs: numbers go to the host, the rest becomes one graph with its writes at the
end.

>>> step = build_step(traced, example_inputs, compile_graph, "step0")
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..autograd.aot import CompileGraph, compile_verified
from ..autograd.extract import extract
from ..autograd.recipe import Recipe
from ..autograd.runtime import rebuilder
from ..autograd.simplify import PASSES, has_effect
from ..base.config import config
from ..graph.module import graph_module
from ..graph.pass_manager import run_passes
from ..graph.shapes import call
from ..graph.spec import GraphInfo, TensorSpec, aten
from . import host
from .numbers import Question
from .rematerialise import compute_again
from .step_trace import Leaves, NotWhole, Path, Traced

_names = itertools.count()
# Elements from one number to the next: pointers to multiples of 16 bytes take the quicker code on a GPU.
NUMBER_STEP = 2


@dataclass(frozen=True)
class StepProgram:
    """A compiled step and how to call it: `compiled(*graph inputs, *parameters, *tensors, *constants,
    *numbers)`.

    numbers: the 0-d tensors in `room` in which the program finds them. reads, writes: numbers by path, and
    `values` makes the new ones (those for `numbers`, then those for `writes`) of the values read. The results
    are `n_values` values of the captured graph, gradients by input (`grads`), and whether a scaled gradient
    overflowed. `ops`: calls in the graph.
    """

    compiled: Callable[..., tuple[Any, ...]]
    n_values: int
    rebuild: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]] | None
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
    ops: int


@dataclass
class _Ends:
    """The results of a traced graph after the passes. `new`: contents by the place that takes them."""

    output: fx.Node
    values: list[fx.Node]
    new: dict[fx.Node, fx.Node]
    grads: list[fx.Node]
    numbers: list[tuple[Path, fx.Node]]
    questions: list[tuple[Question, bool]]
    found: fx.Node | None


def build_step(
    traced: Traced,
    compile_graph: CompileGraph,
    static: frozenset[int],
    device: torch.device,
    *,
    numbers_inside: bool = False,
) -> StepProgram:
    """Compile a traced step. `static`: the captured graph's inputs that are the same tensors at each call.

    numbers_inside: the graph calculates step counts and other numbers too, on a CPU. The host still does, to
    see whether Python would raise.
    """
    graph, leaves, ends = traced.recorder.graph, traced.leaves, _simplified(traced)
    known = traced.recorder.known  # of tensors on a GPU under a scaler nothing is
    paths = (*leaves.numbers.items(), *leaves.tensors.items())
    by_node = {node: path for path, node in paths if known.get(node) is not None}
    on_host = host.on_host(graph, list(by_node), ends.new)
    nodes = [node for node in graph.nodes if node in on_host and node.op == "call_function"]
    reads = [node for node in graph.nodes if node in on_host and node.op == "placeholder"]
    _check_questions(ends, on_host)
    inside = numbers_inside and device.type == "cpu"
    if inside:  # the graph takes Python's own numbers, no others
        on_host = set(leaves.numbers.values())
        read = [node for node in reads if node in on_host]
        crossing = _Crossing(read, dict(zip(read, read)))
    else:
        crossing = _cross(graph, on_host, ends.output, [*ends.values, *ends.grads], device)
    writes = _host_writes(ends, leaves, by_node, on_host)
    wanted = [*crossing.nodes, *(node for _, node in writes), *(nodes if inside else ())]
    tensors = {node: path for path, node in leaves.tensors.items() if node not in on_host}
    inputs, fixed = _inputs(traced, tensors, crossing, static)
    main, n_results = _on_device(traced, ends, on_host, crossing, inputs)
    if (
        device.type == "cuda" or config.target == "triton"
    ):  # a CPU has memory enough, and less to spare of time
        run_passes(main, [("compute again", compute_again)], stage="step")
    info = GraphInfo("forward", f"step{next(_names)}", fixed, n_results)
    ops = sum(node.op == "call_function" for node in main.graph.nodes)
    room = torch.zeros((len(crossing.nodes), NUMBER_STEP), dtype=torch.float64, device=device)
    return StepProgram(
        compiled=compile_verified(main, info, compile_graph),
        n_values=len(ends.values),
        rebuild=rebuilder(Recipe(len(inputs), (), {}, tuple(traced.plans), len(ends.values), (), {})),
        parameters=tuple(k for k, _ in traced.parameters),
        tensors=tuple(tensors.values()),
        constants=tuple(t for _, t in traced.recorder.constants),
        reads=tuple(by_node[node] for node in reads),
        writes=tuple(path for path, _ in writes),
        values=host.HostProgram.of(nodes, reads, wanted, ends.questions).code,
        room=room,
        numbers=tuple(room[:, 0].unbind()),
        grads=tuple(traced.grads),
        owned=traced.owned,
        scaled=ends.found is not None,
        device=device,
        ops=ops,
    )


def _inputs(
    traced: Traced, tensors: dict[fx.Node, Path], crossing: _Crossing, static: frozenset[int]
) -> tuple[list[fx.Node], frozenset[int]]:
    """The program's inputs, and which of them are the same tensors at each call."""
    inputs = [
        *traced.placeholders,
        *(node for _, node in traced.parameters),
        *tensors,
        *(node for node, _ in traced.recorder.constants),
        *crossing.placeholders,
    ]
    fixed = frozenset(
        i
        for i, node in enumerate(inputs)
        if tensors.get(node, ("",))[0] != "grad" and (i >= len(traced.placeholders) or i in static)
    )
    return inputs, fixed


def _simplified(traced: Traced) -> _Ends:
    """Give the graph its outputs and run the passes over it."""
    graph, places, paths = traced.recorder.graph, list(traced.contents), list(traced.numbers)
    asked = list(traced.recorder.questions.items())
    graph.output(
        (
            [*traced.values],
            [*traced.contents.values()],
            [*traced.grads.values()],
            [*traced.numbers.values()],
            [side for question, _ in asked for side in (question.left, question.right)],
            [traced.found],
        )
    )
    run_passes(graph_module(graph, "Step"), PASSES, stage="joint")
    output = next(iter(reversed(graph.nodes)))
    values, contents, grads, numbers, sides, (found,) = output.args[0]  # as it was put in
    questions = [(Question(q.kind, *sides[2 * k : 2 * k + 2]), answer) for k, (q, answer) in enumerate(asked)]
    new = dict(zip(places, contents, strict=True))
    return _Ends(output, values, new, grads, list(zip(paths, numbers, strict=True)), questions, found)


def _check_questions(ends: _Ends, on_host: set[fx.Node]) -> None:
    """NotWhole where the host cannot know a number that it writes, or that a branch asks for."""
    asked = [side for q, _ in ends.questions for side in (q.left, q.right) if isinstance(side, fx.Node)]
    NotWhole.when(
        not on_host.issuperset([*(node for _, node in ends.numbers), *asked]),
        "DM506",
        "the optimizer branches on, or keeps in Python, a number that only the step will know",
    )


def _host_writes(
    ends: _Ends, leaves: Leaves, by_node: dict[fx.Node, Path], on_host: set[fx.Node]
) -> list[tuple[Path, fx.Node]]:
    """The numbers that the host writes, those on a GPU last."""
    writes = [(by_node[place], node) for place, node in ends.new.items() if place in on_host]

    def on_device(write: tuple[Path, fx.Node]) -> bool:
        return write[0] in leaves.tensors and leaves.tensors[write[0]].meta["val"].device.type != "cpu"

    return sorted([*writes, *ends.numbers], key=on_device)


def _on_device(
    traced: Traced, ends: _Ends, on_host: set[fx.Node], crossing: _Crossing, inputs: Sequence[fx.Node]
) -> tuple[fx.GraphModule, int]:
    """The graph of all that the host does not do, with its writes at the end; and how many results it has."""
    graph, new, found = traced.recorder.graph, dict(ends.new), ends.found
    if found is not None:
        skipped = {place: new[place] for place in traced.skipped if place not in on_host}
        new.update(_skipping(graph, ends.output, found, skipped))
    results = [crossing.of(node) for node in (*ends.values, *ends.grads)]
    results += [] if found is None else [found]
    writes = [
        (place, crossing.of(node))
        for place, node in new.items()
        if place not in on_host and place is not node
    ]
    keep = [node for node in graph.nodes if node.op == "call_function" and has_effect(node)]
    return extract(graph, inputs, results, writes=writes, keep=keep), len(results)


def _skipping(
    graph: fx.Graph, output: fx.Node, found: fx.Node, contents: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The new contents, or the old ones where gradients overflowed."""
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
                stand = call(graph, aten._to_copy.default, place, dtype=dtype)
        crossing.stands[node] = stand
        node.replace_all_uses_with(
            stand, delete_user_cb=lambda user: user not in on_host and user is not output
        )
    return crossing
