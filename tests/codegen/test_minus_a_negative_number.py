"""`x - -0.5` in generated C++: two signs in a row are another operator there, and the kernel did not
build.
"""

from __future__ import annotations

import pytest
import torch

import dynamotor
from dynamotor import config

pytestmark = pytest.mark.regression


@pytest.mark.parametrize(
    "x", [torch.randn(7), torch.randn(19, dtype=torch.float64), torch.arange(5), torch.randn(9).bfloat16()]
)
@config.patch(strict=True)
def test_signs_in_a_row(x: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x - -3,
            x - torch.full((), -2, dtype=x.dtype),
            -torch.full((3,), -0.0),
            -(x * 0 + torch.full((), -5, dtype=x.dtype)),
        )

    for found, wanted in zip(dynamotor.compile(f)(x), f(x), strict=True):
        assert torch.equal(found, wanted)


@config.patch(strict=True)
def test_true_as_a_number() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.all() >= y, x.all() + y, x.all() * 0.5

    given = torch.ones(0, 3, dtype=torch.bool), torch.tensor(2)
    for found, wanted in zip(dynamotor.compile(f)(*given), f(*given), strict=True):
        assert torch.equal(found, wanted)
