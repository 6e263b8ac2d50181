"""A parameter that is a tensor subclass: one graph, and its gradient arrives at the object of the user."""

from __future__ import annotations

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


class Weight(torch.Tensor):
    pass


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_gradient_arrives(backend):
    torch.manual_seed(0)
    plain = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    weight = plain.detach().clone().as_subclass(Weight).requires_grad_()

    def loss(x, w):
        return (x @ w).sin().sum()

    x = torch.randn(2, 3, dtype=torch.float64)
    compiled = dynamotor.compile(loss, backend=backend, fullgraph=True)
    for _ in range(2):
        loss(x, plain).backward()
        result = compiled(x, weight)
        assert type(result) is Weight
        result.backward()
    assert torch.allclose(weight.grad, plain.grad)

    def step(w):
        with torch.no_grad():
            return w.sub_(0.1)

    assert dynamotor.compile(step, backend=backend)(weight) is weight
    assert torch.allclose(weight.as_subclass(torch.Tensor), plain - 0.1)


def test_a_number_in_the_place_of_such_a_tensor():
    """An entry's facts about a tensor's size are checked on the next call's argument, whatever its class."""
    compiled = dynamotor.compile(lambda x: x * 2, backend="eager")
    assert torch.equal(compiled(torch.ones(3).as_subclass(Weight)), torch.full((3,), 2.0).as_subclass(Weight))
    assert (compiled(5), compiled("a")) == (10, "aa")
