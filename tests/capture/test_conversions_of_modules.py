"""A module that is brought to where it is (`to`, `float`, `cpu`) stays in the graph, under guards of where it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor.base.events import counters

X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture(autouse=True)
def _anew() -> None:
    dynamotor.reset()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


WAYS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda m: m.to(torch.float32),
    "device": lambda m: m.to("cpu"),
    "both": lambda m: m.to(device=torch.device("cpu"), dtype=torch.float32, non_blocking=True),
    "nothing": lambda m: m.to(),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_conversion_that_changes_nothing_is_in_the_graph(way: str) -> None:
    def run(m: Any, x: Any) -> Any:
        return WAYS[way](m)(x) + 1

    torch.manual_seed(0)
    model = net()
    compiled = dynamotor.compile(run, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(model, X), run(model, X))
    compiled(model, X).sum().backward()
    torch.testing.assert_close(compiled(model, X), run(model, X))
    assert counters["capture"]["graphs"] == 1


def _double(model: Any) -> None:
    model.double()


def _one_parameter(model: Any) -> None:
    model[2][0].weight = nn.Parameter(model[2][0].weight.detach().double())


def _one_buffer(model: Any) -> None:
    model[1].running_mean = model[1].running_mean.double()


def _another_apply(model: Any) -> None:
    class Own(nn.Sequential):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            self.applied = True
            return super()._apply(fn, recurse)

    model[2].__class__ = Own


@pytest.mark.parametrize("change", [_double, _one_parameter, _one_buffer, _another_apply])
def test_what_moved_between_calls_is_brought_back(change: Callable[[Any], None]) -> None:
    def run(m: Any, x: Any) -> Any:
        return m.float()(x)

    torch.manual_seed(0)
    mine, eager = net().eval(), net().eval()
    eager.load_state_dict(mine.state_dict())
    compiled = dynamotor.compile(run)
    compiled(mine, X)
    for model in (mine, eager):
        change(model)
    torch.testing.assert_close(compiled(mine, X), run(eager, X))
    assert [t.dtype for t in mine.state_dict().values()] == [t.dtype for t in eager.state_dict().values()]
    assert hasattr(mine[2], "applied") == hasattr(eager[2], "applied")


def test_a_conversion_that_changes_something_is_eagers() -> None:
    def run(m: Any, x: Any) -> Any:
        return m.double()(x)

    model = net()
    assert dynamotor.compile(run)(model, X.double()).dtype is torch.float64
    assert model[0].weight.dtype is torch.float64 and counters["breaks"]["DM215"]
    with pytest.raises(TypeError):
        dynamotor.compile(lambda m: m.to(torch.int64))(model)


def test_gradients_of_another_type_are_converted() -> None:
    model = nn.Linear(4, 2)
    compiled = dynamotor.compile(lambda m, x: m.to(torch.float32)(x))
    compiled(model, X)
    model.weight.grad_dtype = None
    model.weight.grad = torch.zeros(2, 4, dtype=torch.float64)
    compiled(model, X)
    assert model.weight.grad.dtype is torch.float32


def test_settings_that_make_new_parameters_are_seen() -> None:
    model = nn.Linear(4, 2)
    compiled = dynamotor.compile(lambda m, x: m.float()(x))
    compiled(model, X)
    before = model.weight
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        compiled(model, X)
        assert model.weight is not before
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


class Casting(nn.Module):
    """Brings its weight where it is, as losses of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        data = self.weight.data
        if way == "transposed":
            data.t_()
        self.weight.data = {"of another": self.other.data, "copied": data.clone()}.get(way, data)
        return x @ self.weight


@pytest.mark.parametrize("way", ["the same", "transposed", "of another", "copied"])
def test_data_set_to_what_it_is_changes_nothing(way: str) -> None:
    torch.manual_seed(0)
    eager = Casting()
    ours, x = copy.deepcopy(eager), torch.randn(2, 3)
    compiled = dynamotor.compile(ours, backend="aot_eager", fullgraph=way == "the same")
    for module, call in ((eager, eager), (ours, compiled)):
        call(x, way).sum().backward()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.step()
    torch.testing.assert_close(list(ours.parameters()), list(eager.parameters()))
    torch.testing.assert_close(compiled(x, way), eager(x, way))
    assert (ours.weight.data_ptr() == ours.other.data_ptr()) is (way == "of another")
