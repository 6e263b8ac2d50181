"""Compare a Python function run through `aot_compile` with the same function in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from dynamotor.autograd.aot import aot_compile
from dynamotor.base.config import config
from dynamotor.base.events import counters


def graph_of(fn: Callable, n_inputs: int, n_outputs: int) -> torch.fx.GraphModule:
    """A torch graph with one node that calls `fn`: the trace's view of a captured program."""
    graph = torch.fx.Graph()
    result = graph.call_function(fn, tuple(graph.placeholder(f"x{i}") for i in range(n_inputs)))
    graph.output(tuple(graph.call_function(_item, (result, i)) for i in range(n_outputs)))
    return torch.fx.GraphModule({}, graph)


def _item(result: tuple, index: int) -> object:
    return result[index]


class Compiled:
    """`fn(*tensors) -> tuple` compiled for the metadata of `inputs`; keeps the aten graphs by kind."""

    def __init__(
        self, fn: Callable, inputs: Sequence[torch.Tensor], n_outputs: int, *, strict: bool = True
    ) -> None:
        self.graphs: dict[str, torch.fx.GraphModule] = {}
        with config.patch(verify=True, strict=strict):
            self.run = aot_compile(graph_of(fn, len(inputs), n_outputs), list(inputs), self._compile)

    def _compile(self, gm: torch.fx.GraphModule, info: object) -> Callable:
        self.graphs[info.kind] = gm
        return gm.forward

    def ops(self, kind: str) -> list[str]:
        return [str(node.target) for node in self.graphs[kind].graph.nodes if node.op == "call_function"]


def twins(inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two independent copies of the inputs with their strides and requires_grad."""

    def one(t: torch.Tensor) -> torch.Tensor:
        return copy.deepcopy(t.detach()).requires_grad_(t.requires_grad)

    return [one(t) for t in inputs], [one(t) for t in inputs]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.requires_grad == b.requires_grad, (a.requires_grad, b.requires_grad)
    assert a.dtype == b.dtype
    assert a.stride() == b.stride(), (a.stride(), b.stride())
    torch.testing.assert_close(a, b, equal_nan=True)


def check(
    fn: Callable, *inputs: torch.Tensor, calls: int = 2, strict: bool = True, fallback: bool = False
) -> Compiled:
    """Compile `fn` and compare outputs, mutated inputs and gradients with eager over several calls on the
    same tensors.
    """
    ours, theirs = twins(inputs)
    probe, _ = twins(inputs)
    state = torch.get_rng_state()
    n_outputs = len(fn(*probe))
    torch.set_rng_state(state)
    before = sum(counters["fallback"].values())
    compiled = Compiled(fn, ours, n_outputs, strict=strict and not fallback)
    assert (sum(counters["fallback"].values()) > before) == fallback
    for call in range(calls):
        torch.manual_seed(call)
        expected = fn(*theirs)
        torch.manual_seed(call)
        actual = compiled.run(*ours)
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected):
            if isinstance(b, torch.Tensor):
                same(a, b)
            else:
                assert a == b
        _backward_and_compare(actual, expected, ours, theirs)
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, equal_nan=True)
    return compiled


def _backward_and_compare(actual: Sequence, expected: Sequence, ours: Sequence, theirs: Sequence) -> None:
    wanting = [(a, b) for a, b in zip(actual, expected) if isinstance(b, torch.Tensor) and b.requires_grad]
    if not wanting:
        return
    tangents = [torch.randn_like(b) for _, b in wanting]
    torch.autograd.backward([b for _, b in wanting], tangents)
    torch.autograd.backward([a for a, _ in wanting], tangents)
    for a, b in zip(ours, theirs):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            same(a.grad, b.grad)
