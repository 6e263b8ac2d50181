"""Programs of torch.export become packages: their results, state, dynamic dimensions and their ranges."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_models import PROMPTS, Cached, Llama, decoded, examples

import dynamotor
from dynamotor import UsageError
from dynamotor.base.config import config


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with config.patch(cache_dir=str(tmp_path_factory.mktemp("cache"))):
        yield


@pytest.mark.parametrize("functional", [False, True])
def test_state_and_sizes(functional: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, n = Cached().eval(), torch.export.Dim("n", min=2, max=12)
    shapes = {"x": {1: n}, "at": {0: n}, "total": None}
    program = torch.export.export(copy.deepcopy(model), examples(5), dynamic_shapes=shapes)
    if functional:
        program = program.run_decompositions({})
    dynamotor.export(program).package(tmp_path / "x.dm")
    first, second = dynamotor.load(tmp_path / "x.dm"), dynamotor.load(tmp_path / "x.dm")
    for loaded in (first, second):
        other = copy.deepcopy(model)
        for k, start in ((5, 0), (9, 4), (2, 3)):
            x, at, total = examples(k, start)
            for _ in range(2):
                expected_total = total.clone()
                with torch.no_grad():
                    torch.testing.assert_close(loaded(x, at, total), other(x, at, expected_total))
                torch.testing.assert_close(total, expected_total)
        torch.testing.assert_close(loaded.state, dict(other.named_buffers()))
    with pytest.raises(UsageError, match="DM115(.|\n)*argument 0 of size 13 in dimension 1, but for 2 to 12"):
        first(*examples(13))


def test_methods_share_the_exported_models_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, n = Llama(layers=1).eval(), torch.export.Dim("n", min=2, max=32)
    tokens, at = torch.tensor([PROMPTS[0]]), torch.arange(5)
    prefill = torch.export.export(model, (tokens, at), dynamic_shapes={"tokens": {1: n}, "at": {0: n}})
    step = torch.export.export(model, (tokens[:, :1], at[:1]))
    programs = {"prefill": dynamotor.export(prefill), "decode": dynamotor.export(step)}
    dynamotor.package(tmp_path / "llama.dm", programs)
    loaded = dynamotor.load(tmp_path / "llama.dm")
    assert list(loaded.state) == ["blocks.0.keys", "blocks.0.values"]
    for prompt in PROMPTS:
        assert decoded(loaded.prefill, loaded.decode, prompt, 16) == decoded(model, model, prompt, 16)


class Nested(torch.nn.Module):
    """Arguments in containers and by name, numbers among them, sizes that follow from others."""

    def forward(self, pair: Any, scale: int, *, table: Any) -> Any:
        x, y = pair
        return {"sum": x.sum(1) * scale + y, "table": [table["b"] * 2, table["a"].t()]}


def test_arguments_in_containers(tmp_path: Path) -> None:
    def arguments(n: int, m: int) -> tuple[Any, Any]:
        table = {"a": torch.randn(m, 2), "b": torch.randn(n + m)}
        return ((torch.randn(n, 3), torch.randn(n)), 3), {"table": table}

    n, m = torch.export.Dim("n", max=50), torch.export.Dim("m")
    shapes = {
        "pair": ({0: n}, {0: n}),
        "scale": None,
        "table": {"a": {0: m}, "b": {0: torch.export.Dim.AUTO}},
    }
    args, kwargs = arguments(4, 6)
    program = torch.export.export(Nested(), args, kwargs, dynamic_shapes=shapes)
    dynamotor.export(program).package(tmp_path / "x.dm")
    loaded = dynamotor.load(tmp_path / "x.dm")
    for sizes in ((4, 6), (7, 2), (3, 3)):
        args, kwargs = arguments(*sizes)
        torch.testing.assert_close(loaded(*args, **kwargs), Nested()(*args, **kwargs))
    for wrong, words in (((51, 2), "size 51 in dimension 0"), ((4, 1), "size 1 in dimension 0")):
        args, kwargs = arguments(*wrong)
        with pytest.raises(UsageError, match=f"DM115(.|\n)*{words}"):
            loaded(*args, **kwargs)
    args, kwargs = arguments(4, 6)
    with pytest.raises(UsageError, match="DM115"):
        loaded(args[0], 4, **kwargs)


def test_programs_without_examples_need_some(tmp_path: Path) -> None:
    x = torch.randn(3)
    program = torch.export.export(torch.nn.ReLU(), (x,))
    program._example_inputs = None
    with pytest.raises(UsageError, match="DM140"):
        dynamotor.export(program)
    assert torch.equal(dynamotor.export(program, x).module()(x), x.relu())
    with pytest.raises(UsageError, match="DM140"):
        dynamotor.export(program, x, dynamic_shapes=({0: "n"},))


class Parts(torch.nn.Module):
    """A part without gradients, a change of dtype that torch.export asserts, a cache as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.held = [torch.zeros(4, 3)]

    @torch.no_grad()
    def angles(self, x: torch.Tensor) -> torch.Tensor:
        return (x.double() * self.weight).to(torch.float32).sin()

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.held[0].index_copy_(0, at, self.angles(x))
        return self.held[0].sum(0) * self.weight


@pytest.mark.regression
def test_grad_modes_and_asserted_dtypes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, n = Parts().eval(), torch.export.Dim("n", max=4)
    other, args = copy.deepcopy(model), (torch.randn(2, 3), torch.tensor([1, 3]))
    program = torch.export.export(model, args, dynamic_shapes={"x": {0: n}, "at": {0: n}})
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"wrap_with_set_grad_enabled"} <= targets
    dynamotor.export(program).package(tmp_path / "x.dm")
    loaded = dynamotor.load(tmp_path / "x.dm")
    for rows in ([1, 3], [0, 2, 1], [2, 0]):
        args = torch.randn(len(rows), 3), torch.tensor(rows)
        torch.testing.assert_close(loaded(*args), other(*args).detach())
    (state,) = loaded.state.values()
    torch.testing.assert_close(state, other.held[0])
