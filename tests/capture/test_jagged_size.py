"""Jagged tensors' own sizes in captured programs."""

from __future__ import annotations

import pytest
import torch

import dynamotor


@pytest.fixture
def x():
    dynamotor.reset()
    return torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(4, 6)], layout=torch.jagged)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.size(1),
        lambda x: x.shape,
        lambda x: x.stride(),
        lambda x: x.size(1) * 3,
        lambda x: x.size(1) == 4,
        lambda x: x.size(1) != (x * 2).size(1),
        lambda x: {x.size(1): 1}[(x + 1).size(1)],
        lambda x: type(x.size(1)),
        lambda x: x.view(x.size(0), x.size(1), 2, 3).shape[1] == x.size(1),
    ],
)
def test_answers_are_eagers(x, fn):
    got = dynamotor.compile(fn)(x)
    assert got == fn(x) and type(got) is type(fn(x))


def test_arithmetic_that_eager_refuses_is_refused(x):
    def fn(x):
        return x.size(1) + 1

    with pytest.raises(Exception) as want:  # noqa: PT011  (whatever eager raises)
        fn(x)
    with pytest.raises(want.type):
        dynamotor.compile(fn)(x)
