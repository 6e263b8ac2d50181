"""`index_add` was done in place on a value that was its source, too (equal `full`s are one node)."""

from __future__ import annotations

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def test_base_and_source_are_one_value():
    def f(i):
        return torch.full((3,), 1.0).index_add(0, i, torch.full((3,), 1.0)) * 2

    i = torch.tensor([0, 1, 1])
    assert torch.equal(dynamotor.compile(f)(i), f(i))
