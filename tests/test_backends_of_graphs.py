"""`compile_fx` and our backend of `torch.compile` on graph modules as they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.torch_compile_adapter import dynamotor_backend

X = torch.randn(4)


def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a + b).relu()


GRAPH = torch.fx.symbolic_trace(function)


def changed() -> torch.fx.GraphModule:
    graph = torch.fx.symbolic_trace(function)
    graph.recompile()
    return graph


@pytest.mark.parametrize(
    "use",
    [
        lambda: dynamotor.compile(function, backend=dynamotor.compile_fx, fullgraph=True)(X, X),
        lambda: torch.compile(function, backend=lambda g, inputs: dynamotor.compile_fx(g, inputs))(X, X),
        lambda: dynamotor.compile(lambda a: torch.fx.Interpreter(GRAPH).run(a, a))(X),
        lambda: dynamotor.compile_fx(changed(), [X, X])(X, X),
    ],
    ids=["our capture", "torch.compile's capture", "an Interpreter inside", "a changed graph"],
)
def test_compile_fx_is_a_backend(use: Any) -> None:
    torch._dynamo.reset()
    assert torch.equal(use(), function(X, X))


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.sin() + 1,
        lambda x: (x.sin(),),
        lambda x: [x.sin(), x + 1],
        lambda x: {"a": x.sin(), "b": [x + 1, 3]},
        lambda x: (x.sin(), None, 2),
    ],
)
def test_a_graph_returns_what_it_returned(model: Any) -> None:
    graph = torch.fx.symbolic_trace(model)
    found, expected = dynamotor_backend(graph, [X])(X), model(X)
    assert str(type(found)) == str(type(expected))
    torch.testing.assert_close(found, expected)
