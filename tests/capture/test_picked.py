"""`min` and `max` of a number and a tensor of one element: one graph for arithmetic, eager's object as a result."""

import itertools
import math

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

PROGRAMS = {
    "clamped": lambda x, t: min(max(t, 0), 1) * x,
    "the other order": lambda x, t: x - max(0.5, min(1, t)),
    "augmented": lambda x, t: augmented(x, t),
    "written afterwards": lambda x, t: written(x, t),
    "of a sum": lambda x, t: max(x.sum(), 0.25) * x,
}
BROKEN = {
    "returned": lambda x, t: (max(t, 0), min(1, t), x * 2),
    "returned, of both": lambda x, t: (min(max(t, 0), 1), max(x.sum(), 1)),
    "a method": lambda x, t: (x * 2).add_(max(t, 0)),
    "a quotient": lambda x, t: x / max(t, 0.5),
    "its type": lambda x, t: x * 2 if isinstance(max(t, 0), torch.Tensor) else x,
    "a write into it": lambda x, t: written_into(x, t),
    "an argument": lambda x, t: torch.mul(x, max(t, 0)),
    "no number of the type": lambda x, t: max(t, 0.1) * x,
    "of another type": lambda x, t: max(t.double(), 0) * x,
    "a gradient": lambda x, t: max(t.clone().requires_grad_(), 0) * x,
}
VALUES = (0.3, -0.5, 1.75, 0.0, -0.0, 1.0, math.nan, math.inf)


def augmented(x, t):
    y = x * 3
    y *= max(t, 0)
    return y


def written(x, t):
    t = t.clone()
    p = max(t, 0)
    t.add_(1)
    return x * p


def written_into(x, t):
    t = t.clone()
    p = max(t, 0)
    p += x.sum()
    return p, t


def check(program, compiled):
    for value in VALUES:
        x, t = torch.linspace(-1, 1, 5), torch.tensor(value)
        want, got = program(x, t), compiled(x, t)
        if not isinstance(want, tuple):
            want, got = (want,), (got,)
        for a, b in zip(want, got, strict=True):
            assert type(a) is type(b) and (a is t) == (b is t)
            if isinstance(a, torch.Tensor):
                assert a.dtype is b.dtype and a.requires_grad == b.requires_grad
                torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
            else:
                assert a == b


@pytest.mark.parametrize(("name", "backend"), itertools.product(PROGRAMS, ("native", "eager")))
def test_arithmetic_is_one_graph(name, backend):
    dynamotor.reset()
    before = counters["frames"]["captured"]
    check(PROGRAMS[name], dynamotor.compile(PROGRAMS[name], backend=backend, fullgraph=True))
    assert counters["frames"]["captured"] - before == 1


@pytest.mark.parametrize("name", BROKEN)
def test_any_other_use_gets_eagers_object(name):
    dynamotor.reset()
    check(BROKEN[name], dynamotor.compile(BROKEN[name], backend="eager"))
