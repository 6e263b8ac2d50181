"""The verifier tries the positions where the bounds of sums say too little."""

from __future__ import annotations

import torch

import dynamotor
from dynamotor.base.config import config


def test_conditions_and_remainders_together() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x < y.flip(0, -1).reshape((112, 1, 1)).roll(1, 0).prod(0)).any(1)

    x, y = torch.randn(7, 8, 2), torch.randn(7, 8, 2)
    with config.patch(strict=True, verify=True):
        assert torch.equal(dynamotor.compile(f)(x, y), f(x, y))
