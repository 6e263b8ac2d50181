"""Sums and products with a boolean result are any and all of the elements: two true ones gave False, a product
-1 behind a cast.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.config import config

pytestmark = pytest.mark.regression

PROGRAMS: dict[str, Any] = {
    "all of integers": lambda x: x.long().sum(dtype=torch.bool),
    "rows of floats": lambda x: (x / 2).sum(-1, dtype=torch.bool),
    "columns of booleans": lambda x: x.bool().sum(0, dtype=torch.bool),
    "sums that cancel": lambda x: (x - x.flip(0)).sum(0, dtype=torch.bool),
    "with something behind": lambda x: ~x.sum(-1, keepdim=True, dtype=torch.bool) | (x > 1),
    "tensordot": lambda x: torch.tensordot(x.bool()[0, ::2], x.bool()[1, ::2], 1),
    "products of columns": lambda x: x.bool().prod(0, dtype=torch.bool) * 1.0,
    "products of rows": lambda x: (x / 2).prod(-1, dtype=torch.bool) + 1,
    "a product of nothing but itself": lambda x: (
        x[0, 0].prod(0, dtype=torch.bool).sum(0, dtype=torch.float32)
    ),
}


@pytest.mark.parametrize("target", ["cpp", "triton"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_of_them_are_true(name: str, target: str) -> None:
    x = torch.tensor([[1.0, 1, 0, 2, 1, 0], [1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]])
    with config.patch(**({} if target == "cpp" else {"target": target})):
        assert torch.equal(dynamotor.compile(PROGRAMS[name])(x), PROGRAMS[name](x))


@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_running_results_of_booleans_are_refused_as_in_eager(name: str) -> None:
    with pytest.raises(NotImplementedError):
        dynamotor.compile(lambda x: getattr(x, name)(0, dtype=torch.bool) * 2)(torch.ones(3))
