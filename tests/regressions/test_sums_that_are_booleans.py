"""A sum with a boolean result is true where any element is: two of them gave False in C++."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.config import config

PROGRAMS: dict[str, Any] = {
    "all of integers": lambda x: x.long().sum(dtype=torch.bool),
    "rows of floats": lambda x: (x / 2).sum(-1, dtype=torch.bool),
    "columns of booleans": lambda x: x.bool().sum(0, dtype=torch.bool),
    "sums that cancel": lambda x: (x - x.flip(0)).sum(0, dtype=torch.bool),
    "with something behind": lambda x: ~x.sum(-1, keepdim=True, dtype=torch.bool) | (x > 1),
    "products": lambda x: torch.tensordot(x.bool()[0, ::2], x.bool()[1, ::2], 1),
}


@pytest.mark.parametrize("target", ["cpp", "triton"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_of_them_are_true(name: str, target: str) -> None:
    x = torch.tensor([[1.0, 1, 0, 2, 1, 0], [1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]])
    with config.patch(**({} if target == "cpp" else {"target": target})):
        assert torch.equal(dynamotor.compile(PROGRAMS[name])(x), PROGRAMS[name](x))
