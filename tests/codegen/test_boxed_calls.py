"""A compiled backward frees saved values as it goes; a graph that is kept keeps it."""

from __future__ import annotations

import weakref

import pytest
import torch

import dynamotor
from dynamotor import codegen
from dynamotor.base.events import collect
from dynamotor.graph.spec import GraphInfo, TensorSpec

ALIVE: list[list[bool]] = []
WATCHED: list[weakref.ref] = []


@torch.library.custom_op("dynamotor_tests::probe", mutates_args=())
def probe(x: torch.Tensor) -> torch.Tensor:
    ALIVE.append([ref() is not None for ref in WATCHED])
    return x.clone()


@probe.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def program(kind: str) -> codegen.CallProgram:
    """a @ b, a probe of that, times c."""
    graph = torch.fx.Graph()
    spec = TensorSpec.dense((32, 32), torch.float32)

    def node(made: torch.fx.Node) -> torch.fx.Node:
        made.meta["val"] = spec
        return made

    a, b, c = (node(graph.placeholder(name)) for name in "abc")
    product = node(graph.call_function(torch.ops.aten.mm.default, (a, b)))
    seen = node(graph.call_function(torch.ops.dynamotor_tests.probe.default, (product,)))
    graph.output((node(graph.call_function(torch.ops.aten.mm.default, (seen, c))),))
    gm = torch.fx.GraphModule({}, graph)
    return codegen.compile_aten(gm, GraphInfo(kind, "probe"))


@pytest.mark.parametrize("kind", ["backward", "inference"])
def test_inputs_are_freed_after_their_last_use(kind: str) -> None:
    compiled = program(kind)
    given = [torch.randn(32, 32) for _ in range(3)]
    wanted = given[0] @ given[1] @ given[2]
    WATCHED[:] = [weakref.ref(t) for t in given]
    ALIVE.clear()
    for (out,) in (compiled(*given), compiled.boxed(given)):
        torch.testing.assert_close(out, wanted)
    taken = kind == "backward"  # a program of another kind leaves its caller's list alone
    assert [[True] * 3, [not taken, not taken, True]] == ALIVE and len(given) == (0 if taken else 3)


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_kept_graph_can_be_run_backward_again_and_any_other_says_so() -> None:
    torch.manual_seed(0)
    model, x = Deep().double(), torch.randn(5, 8, dtype=torch.float64)
    eager = torch.autograd.grad(model(x).sum(), model.parameters())
    loss = dynamotor.compile(model)(x).sum()
    for keep in (True, True, False):
        torch.testing.assert_close(torch.autograd.grad(loss, model.parameters(), retain_graph=keep), eager)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_the_text_of_a_backward_lets_go_of_what_it_was_given() -> None:
    model, x = Deep(), torch.randn(64, 8)
    with collect("code") as found:
        dynamotor.compile(model)(x).sum().backward()
    text = next(e.data["python"] for e in found if "backward" in e.data["name"])
    assert "given.clear()" in text and "\n    del arg" in text
