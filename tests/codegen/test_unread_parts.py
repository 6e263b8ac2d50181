"""A joined tensor of which one part is outside of every slice: a correct kernel was refused (DM913)."""

from __future__ import annotations

import pytest
import torch

import dynamotor
from dynamotor import config

pytestmark = pytest.mark.regression


@config.patch(strict=True)
def test_a_part_outside_of_the_slice() -> None:
    def f(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.cat([y * 2, x.sum(-1, keepdim=True)], -1)[::3, :52:3].index_select(1, at)

    args = torch.randn(2, 64), torch.randn(2, 64), torch.randint(0, 18, (64,))
    torch.testing.assert_close(dynamotor.compile(f)(*args), f(*args))
