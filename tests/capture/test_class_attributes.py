"""Attributes that are found on a class."""

from __future__ import annotations

import functools

import pytest
import torch

import dynamotor


def eager_backend(gm, example_inputs):
    return gm.forward


@pytest.mark.regression
def test_an_attribute_that_is_a_class_is_no_bound_method():
    """`typing.List[int].__origin__` and `(1).__class__` are classes, not methods."""
    compiled = dynamotor.compile(
        lambda x: ((1).__class__, functools.partial(int).func, x), backend=eager_backend, fullgraph=True
    )
    assert compiled(torch.ones(1))[:2] == (int, int)
