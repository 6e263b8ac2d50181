"""Thousands of cheap operations one behind the other compile: expressions and kernels are cut before they get too
deep to walk.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x * a + b": lambda x: x * 1.0001 + 0.001,
    "of views": lambda x: (x * 1.001).t() + 0.001,
    "sin": torch.sin,
    "a residual": lambda x: x + x * 0.001,
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.slow
def test_a_chain_of_cheap_operations(name: str) -> None:
    step, n = STEPS[name], 600

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n):
            x = step(x)
        return x

    before = counters["fallback"].total()
    x, z = (torch.linspace(0.1, 1, 6).view(2, 3).requires_grad_() for _ in range(2))
    found, wanted = dynamotor.compile(program)(x), program(z)
    found.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-4, atol=1e-5)
    assert counters["fallback"].total() == before
