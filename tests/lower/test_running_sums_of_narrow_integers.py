"""Running sums and products in narrow integers wrap before what follows reads them: they were read wide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor
from dynamotor.base.config import config

pytestmark = pytest.mark.regression

FOLLOWERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a cast": lambda y: y.to(torch.float32),
    "a comparison": lambda y: y > 0,
    "a sum": lambda y: y.sum(-1, dtype=torch.int64),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", ["cpp", "triton"])
@pytest.mark.parametrize("name", FOLLOWERS)
@pytest.mark.parametrize("kind", ["cumsum", "cumprod", "sum", "prod"])
def test_what_follows_reads_wrapped_numbers(kind: str, name: str, target: str) -> None:
    x = torch.tensor([[17, 33, 7, 18, 29, 35, 12], [120, 120, 1, 2, 3, 4, 5]])
    with config.patch(**({} if target == "cpp" else {"target": target})):
        for dtype in (torch.int8, torch.uint8, torch.int16):

            def fn(x: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
                return FOLLOWERS[name](getattr(x, kind)(-1, dtype=dtype))

            assert torch.equal(dynamotor.compile(fn)(x), fn(x))
