"""Numbers that differ between calls."""

from __future__ import annotations

import pytest
import torch

import dynamotor


@pytest.mark.regression
@pytest.mark.parametrize("then", [None, 2.5, True, "no", torch.ones(2), [2], 9])
def test_integers_that_were_equal_and_are_none(then):
    """What tells sizes apart computed with None: a TypeError for the user's call."""

    def fn(x, a, b):
        if a is None or isinstance(a, str | list):
            return x + 1
        return x + a if isinstance(a, int) and a == b else x * a

    compiled, x = dynamotor.compile(fn, backend="eager"), torch.ones(2)
    for pair in [(3, 3), (4, 4), (5, 5), (then, 6), (7, 7), (then, then)]:
        assert torch.equal(compiled(x, *pair), fn(x, *pair))
