"""A tensor cut off from an input that is written with a graded value requires a gradient; its replay from the
input had none.
"""

from __future__ import annotations

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def copied(x, y):
    cut = x.detach()
    cut.copy_(y)
    return (cut,)


def scaled_beside(x, y):
    cut = x.detach()
    cut.mul_(y)
    return cut, x * 2


def part(x, y):
    cut = x[0].detach()
    cut.mul_(y[0])
    return (cut,)


def of_a_value(x, y):
    value = x * 1
    cut = value.detach()
    cut.mul_(y)
    return cut, value


def through_data(x, y):
    data = x.data
    data.mul_(y)
    return (data,)


@pytest.mark.parametrize("function", [copied, scaled_beside, part, of_a_value, through_data])
@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_a_write_brings_its_gradient(function, backend):
    y = torch.randn(2, 3, requires_grad=True)
    start = torch.randn(2, 3)
    results = []
    for call in (function, dynamotor.compile(function, backend=backend)):
        x = start.clone()
        outputs = call(x, y)
        graded = [out.sum() for out in outputs if out.requires_grad]
        grad = torch.autograd.grad(sum(graded), y, allow_unused=True)[0] if graded else None
        results.append(([out.requires_grad for out in outputs], grad, x))
    (want, want_grad, want_x), (got, got_grad, got_x) = results
    assert got == want
    assert (got_grad is None) == (want_grad is None)
    assert want_grad is None or torch.equal(got_grad, want_grad)
    assert torch.equal(got_x, want_x)
