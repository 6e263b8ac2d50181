"""Equal ops on one memory in two shapes are calculated once, with the shapes and values of each."""

from __future__ import annotations

import pytest
import torch
from support import Compiled, check

ROWS = torch.randn(4, 6, 8)


def repeated(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat = x.reshape(-1, 8)
    scale = x.abs().max()
    return (x * scale).clamp(-1, 1).sum(1), (flat * flat.abs().max()).clamp(-1, 1).sum(1)


def count(fn, x, op):
    return Compiled(fn, [x], 2).ops("inference").count(op)


def test_a_map_of_the_same_memory_in_another_shape_is_a_view():
    for op in ("aten.abs.default", "aten.max.default", "aten.clamp.default"):
        assert count(repeated, ROWS, op) == 1, op
    check(repeated, ROWS.clone())


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.transpose(0, 1).reshape(-1, 8),  # another order
        lambda x: x[1:].reshape(-1, 8),  # a part
        lambda x: x.to(torch.bfloat16).reshape(-1, 8),  # another type
    ],
)
def test_other_memory_is_calculated_on_its_own(other):
    def fn(x):
        return x.sin().sum(1), other(x).sin().sum(1)

    assert count(fn, ROWS, "aten.sin.default") == 2
    check(fn, ROWS.clone())


def test_sums_are_not_shared():
    """Their rounding depends on the order."""
    fn = lambda x: (x.sum(), x.reshape(-1, 8).sum())  # noqa: E731
    assert count(fn, ROWS, "aten.sum.default") == 2
