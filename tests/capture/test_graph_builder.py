"""Inputs of a graph: names that are equal, and the name `self`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamotor


def eager_backend(gm, example_inputs):
    return gm.forward


@pytest.mark.regression
def test_inputs_of_equal_names_stay_apart():
    """T5: one parameter's name with an index appended was the name of another input."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.w_1, self.inner = (
                nn.Parameter(torch.ones(2)),
                nn.Parameter(torch.ones(2) * 2),
                nn.Linear(2, 2),
            )

        def forward(self, x, w, w_1):
            return x * self.w + self.w_1 * w + w_1

    model, x = Twice(), torch.randn(2)
    compiled = dynamotor.compile(model, backend=eager_backend, fullgraph=True)
    assert torch.equal(compiled(x, x + 1, x + 2), model(x, x + 1, x + 2))


@pytest.mark.regression
def test_a_tensor_named_self() -> None:
    def function(self, other):
        return (self @ other).relu()

    a, b = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    torch.testing.assert_close(
        dynamotor.compile(function, backend="eager", fullgraph=True)(a, b), function(a, b)
    )


@pytest.mark.regression
@pytest.mark.parametrize("base", [-3, -1, -2.5])
def test_powers_of_a_negative_number(base: float) -> None:
    """torch.fx writes such a power of a tensor without parentheses."""
    compiled, x = (
        dynamotor.compile(lambda x, k: (base**x, k**x), backend="eager", fullgraph=True),
        torch.tensor([1, 2]),
    )
    for k in (-2, -3, -4.5):
        torch.testing.assert_close(compiled(x, k), (base**x, k**x))
