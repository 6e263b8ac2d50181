"""Gradients of gradients of programs with tensors of wrapper subclasses."""

from __future__ import annotations

import pytest
import torch
from wrapper_classes import Pair

import dynamotor

F = torch.nn.functional


def pair():
    return Pair(torch.randn(3, 4).double(), torch.randn(3, 4).double()).requires_grad_()


def assert_same(want, got):
    torch.testing.assert_close(want.a, got.a)
    torch.testing.assert_close(want.b, got.b)


@pytest.fixture(autouse=True)
def _again():
    dynamotor.reset()


def second(fn, x, weight):
    y = fn(x, weight)
    y = sum(one * (k + 1) for k, one in enumerate(y)) if isinstance(y, tuple) else y
    (first,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    z = first * first + x * x
    return first, *torch.autograd.grad(z, [x, weight], torch.ones_like(z), allow_unused=True)


PROGRAMS = {
    "one": lambda x, weight: (x * weight).sin(),
    "several": lambda x, weight: ((x * weight).sin(), x * x, x.detach()),
    "twice": lambda x, weight: (y := (x * weight).cos(), y),
}


@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS)
def test_gradients_of_gradients_are_eagers(fn):
    x, weight = pair(), torch.randn(4, dtype=torch.float64, requires_grad=True)
    compiled = dynamotor.compile(fn, fullgraph=True)
    for one, other in zip(second(fn, x, weight), second(compiled, x, weight), strict=True):
        if isinstance(one, Pair):
            assert_same(one, other)
        else:
            torch.testing.assert_close(one, other)


def test_a_graph_that_draws_is_refused():
    compiled = dynamotor.compile(lambda x: F.dropout(x * x, 0.5), fullgraph=True)
    x = pair()
    y = compiled(x)
    with pytest.raises(dynamotor.BackendError, match="DM408"):
        torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.a.add_(1)], ids=["whole", "part"])
def test_an_input_that_was_written_since_is_refused(write):
    x = pair()
    y = dynamotor.compile(lambda x: x.sin(), fullgraph=True)(x)
    with torch.no_grad():
        write(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
