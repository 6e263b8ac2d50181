"""Two inputs of different dtypes written in one graph: each is rounded to its own (both once were to the last
one's).
"""

from __future__ import annotations

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


@pytest.mark.parametrize(
    "order",
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float16)],
)
def test_each_written_input_keeps_its_dtypes_digits(order: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(0)
    x = torch.randn(1000, dtype=torch.float64)

    def f(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.copy_(x * 1.1)
        b.copy_(x * 1.3)
        return x + 1

    found = [torch.zeros(1000, dtype=dtype) for dtype in order]
    wanted = [t.clone() for t in found]
    f(x, *wanted)
    dynamotor.compile(f)(x, *found)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
