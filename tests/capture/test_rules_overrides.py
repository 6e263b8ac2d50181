"""Classes of parameters that change nothing are captured as parameters are."""

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters


class Plain(torch.nn.Parameter):
    """A name alone."""


class WithNumber(torch.nn.Parameter):
    def __new__(cls, data, scale=2):
        made = super().__new__(cls, data)
        made.scale = scale
        return made


class WithMethod(torch.nn.Parameter):
    def twice(self):
        return self * 2


class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight = kind(torch.randn(3))

    def forward(self, x):
        out = x * self.weight + getattr(self.weight, "scale", 1)
        return out, isinstance(self.weight, Plain), type(self.weight).__name__, self.weight, self.weight * 2


@pytest.mark.parametrize("kind", [Plain, WithNumber, WithMethod])
def test_parameters_of_a_class_of_their_own(kind):
    dynamotor.reset()
    model, x = Model(kind), torch.ones(3)
    compiled = dynamotor.compile(model)
    for i in range(4):
        results = []
        for call in (compiled, model):
            out = call(x)
            (gradient,) = torch.autograd.grad(out[0].sum(), [model.weight])
            results.append((*out, gradient))
        for ours, eager in zip(*results, strict=True):
            assert type(ours) is type(eager)
            assert torch.equal(ours, eager) if isinstance(ours, torch.Tensor) else ours == eager
        assert results[0][3] is model.weight
        if kind is WithNumber:
            model.weight.scale = i + 5
        elif i == 1:
            model.weight = torch.nn.Parameter(torch.randn(3))  # another class
    assert kind is WithMethod or not counters["breaks"]
