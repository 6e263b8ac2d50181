"""`dynamotor.export`: the graph, its signature, its guards, the program on backends, and as torch.export's."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor import UsageError


class Net(torch.nn.Module):
    """A parameter, a buffer that is written, a tensor that is neither, a view and an argument among the results."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.others = [torch.ones(4)]

    def forward(self, x: torch.Tensor, k: int = 2, *, y: torch.Tensor | None = None) -> dict[str, Any]:
        self.calls += 1
        out = self.inner(x) * k + self.others[0]
        return {"out": out, "rows": x.shape[0], "flat": out.view(-1), "x": x, "y": None if y is None else y.T}


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X, Y = torch.randn(5, 3), torch.randn(2, 2)


def same(program: Any, net: Net, x: torch.Tensor) -> None:
    want, got = net(x, y=Y), program(x, y=Y)
    torch.testing.assert_close(got["out"], want["out"])
    torch.testing.assert_close(got["flat"], want["flat"])
    assert got["rows"] == len(x) and torch.equal(got["y"], Y.T)


def test_the_graph_and_its_signature(net: Net) -> None:
    program = dynamotor.export(net, (X,), {"y": Y})
    assert net.calls == 0  # nothing ran
    names = {i.name: (i.kind, i.target) for i in program.graph_signature.inputs}
    assert names == {
        "self_calls": ("buffer", "calls"),
        "x": ("argument", "x"),
        "self_inner_weight": ("parameter", "inner.weight"),
        "self_inner_bias": ("parameter", "inner.bias"),
        "self_others_0": ("constant", "self.others[0]"),
        "y": ("argument", "y"),
    }
    assert program.graph_signature.writes == ("self_calls",)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.addmm.default in called and called[-1] is torch.ops.aten.copy_.default


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager", lambda gm, inputs: gm.forward])
def test_it_runs_on_a_backend_and_refuses_other_calls(net: Net, backend: Any) -> None:
    run = dynamotor.export(net, (X,), {"y": Y}).module(backend)
    same(run, net, X)
    for args, kwargs, why in (
        ((torch.randn(7, 3),), {"y": Y}, "argument `x` has size 7 at dimension 0, was 5"),
        ((X, 3), {"y": Y}, "positional arguments"),
        ((X,), {"y": None}, "y"),
    ):
        with pytest.raises(UsageError, match=f"DM115(?s:.*){why}"):
            run(*args, **kwargs)
    net.inner.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="DM115"):
        run(X, y=Y)


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: "batch"}, "y": None},
        [{0: "batch"}, None],
        {"x": (torch.export.Dim.AUTO, torch.export.Dim.STATIC)},
        {"x": {0: torch.export.Dim("batch", min=2, max=9)}},
    ],
)
def test_dimensions_that_may_differ(net: Net, shapes: Any) -> None:
    x = X.clone()
    program = dynamotor.export(net, (x,), {"y": Y}, dynamic_shapes=shapes)
    assert not x.__dict__
    assert [i.target for i in program.graph_signature.inputs if i.kind == "size"] == ["x.shape[0]"]
    run = program.module("eager")
    same(run, net, X)
    same(run, net, torch.randn(7, 3))
    if isinstance(shapes, dict) and shapes["x"] == {0: torch.export.Dim("batch", min=2, max=9)}:
        with pytest.raises(UsageError, match="DM115"):
            run(torch.randn(10, 3), y=Y)


def test_a_program_that_needs_the_number() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 3) if x.shape[0] == 2 else x

    with pytest.raises(UsageError, match="DM117"):
        dynamotor.export(fn, (torch.ones(2, 3),), dynamic_shapes=({0: "batch"},))


@pytest.mark.parametrize("shapes", [None, {"x": {0: "batch"}}])
def test_as_an_exported_program(net: Net, shapes: Any) -> None:
    exported = dynamotor.export(net, (X,), {"y": Y}, dynamic_shapes=shapes).exported_program()
    assert isinstance(exported, torch.export.ExportedProgram)
    assert exported.state_dict.keys() >= {"inner.weight", "inner.bias", "calls"}
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    run = torch.export.load(file).module()
    same(run, net, X)
    if shapes:
        same(run, net, torch.randn(7, 3))


def test_what_no_exported_program_holds() -> None:
    seen: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x + 1

    program = dynamotor.export(fn, (X,))
    assert not seen and torch.equal(program.module("eager")(X), X + 1) and seen == [1]
    with pytest.raises(UsageError, match="DM114"):
        program.exported_program()
    with pytest.raises(UsageError, match="DM114"):
        dynamotor.export(lambda n: n + 1, (1,))


@pytest.mark.regression
def test_programs_of_one_function_have_dimensions_of_their_own() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() + y.sum()

    rows = torch.export.Dim("rows")
    programs = [
        dynamotor.export(fn, (torch.ones(6, 2), torch.ones(6, 3)), dynamic_shapes=shapes)
        for shapes in (({0: rows}, None), ({0: rows}, {0: rows}))
    ]
    for _ in range(2):  # a second one would look for programs of others
        first, second = [program.module("eager") for program in programs]
    x, y = torch.ones(8, 2), torch.ones(8, 3)
    torch.testing.assert_close(first(x, y[:6]), fn(x, y[:6]))
    torch.testing.assert_close(second(x, y), fn(x, y))
    for run, given in ((first, (x, y)), (second, (x, y[:6]))):
        with pytest.raises(UsageError, match="DM115"):
            run(*given)


@pytest.mark.regression
@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (lambda x: x[x > 0], "data decides a size or a branch"),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "data decides a size or a branch"),
        (lambda x: 3, "nothing of it runs on tensors"),
    ],
    ids=["size", "branch", "nothing"],
)
def test_a_program_that_is_not_one_graph_says_why(program: Any, cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        dynamotor.export(program, torch.randn(3))
