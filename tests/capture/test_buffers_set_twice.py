"""A buffer that a call gives several values in turn holds the last one, which is not in the graph's inputs."""

from __future__ import annotations

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

pytestmark = pytest.mark.regression


def test_a_buffer_that_is_set_twice() -> None:
    class Net(torch.nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = x.detach() + self.mean
            self.mean = self.mean * 2
            return x - self.mean

    ours, theirs, x = Net(), Net(), torch.randn(2)
    call = dynamotor.compile(ours, fullgraph=True, backend="eager")
    for _ in range(3):
        assert torch.equal(call(x), theirs(x))
        assert torch.equal(ours.mean, theirs.mean)


class _Adapted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(8, 8)
        self.a, self.b = torch.nn.Parameter(torch.randn(2, 8)), torch.nn.Parameter(torch.randn(8, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


@pytest.mark.parametrize("graded", [False, True])
def test_adapters_that_are_new_parameters_are_inputs_from_the_second_on(graded):
    model = torch.nn.Sequential(_Adapted(), torch.nn.ReLU(), _Adapted())
    compiled, before = dynamotor.compile(model), counters["capture"]["graphs"]
    for _ in range(5):
        with torch.set_grad_enabled(graded):
            x, found = torch.randn(3, 8), []
            for run in (compiled, model):
                model.zero_grad()
                y = run(x)
                if graded:
                    y.sum().backward()
                found.append((y.detach(), [p.grad for p in model.parameters()]))
        torch.testing.assert_close(*found)
        for layer in (model[0], model[2]):
            layer.a, layer.b = torch.nn.Parameter(torch.randn(2, 8)), torch.nn.Parameter(torch.randn(8, 2))
    assert counters["capture"]["graphs"] - before == 2
