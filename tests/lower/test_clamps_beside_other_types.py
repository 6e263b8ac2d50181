"""Bounds of a clamp are those of its own type, whichever op is lowered when they are asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dynamotor

pytestmark = pytest.mark.regression

HALF = torch.float16
CASES: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "an op of two results": (lambda x: torch.frexp(F.relu6(x)), (torch.tensor(0.7),)),
    "another op of two results": (
        lambda x: x.clamp(min=0).cummin(0),
        (torch.tensor([[0.1, 2.0]]),),
    ),
    "a narrower type": (lambda x: F.hardtanh(x).to(torch.uint8), (torch.tensor([0, 1, -1, 5]),)),
    "a wider type": (
        lambda x: x.clamp(min=-1).to(torch.int64) + 1,
        (torch.tensor([0, 1, 255], dtype=torch.uint8),),
    ),
    "a choice of halves": (
        lambda x, y: torch.where(x > 0, x, y).float() * 4096,
        (torch.tensor([1.0, -1.0], dtype=HALF), torch.tensor(0.3333333)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_eagers(name: str) -> None:
    function, inputs = CASES[name]
    torch.testing.assert_close(dynamotor.compile(function)(*inputs), function(*inputs), rtol=0, atol=0)


def test_a_flip_behind_a_regrouping_may_be_cut() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x[:3].flip(-1).reshape((3, 1))[1:].cumsum(1)

    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with dynamotor.config.patch(verify=True):
        y = dynamotor.compile(f)(x)
        y.backward(torch.tensor([[1.0], [2.0]]))
    assert y.tolist() == [[2.0], [1.0]] and x.grad is not None and x.grad.tolist() == [2.0, 1.0, 0.0]
