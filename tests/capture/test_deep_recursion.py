"""Recursion within Python's limit runs, however deep."""

from __future__ import annotations

import pytest
import torch

import dynamotor


def down(x: torch.Tensor, n: int) -> torch.Tensor:
    return x if n == 0 else down(x + 1, n - 1)


@pytest.mark.parametrize("depth", [50, 230, 700])
def test_a_deep_recursion_gives_what_eager_gives(depth: int) -> None:
    compiled = dynamotor.compile(down, backend="eager")
    assert torch.equal(compiled(torch.ones(3), depth), down(torch.ones(3), depth))
