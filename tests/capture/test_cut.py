"""Graph breaks inside comprehensions and inside `iter`."""

from __future__ import annotations

import pytest
import torch

import dynamotor
from dynamotor.capture.attempts import Attempt


def eager_backend(gm, example_inputs):
    return gm.forward


@pytest.mark.regression
def test_a_comprehension_cut_in_the_middle_keeps_its_items():
    """Backward hooks: the list of a resumed comprehension lost items appended after the break."""

    def f(x):
        return [t for t in (x, x + 1, x + 2) if t.sum() > 0]

    compiled = dynamotor.compile(f, backend=eager_backend)
    for x in (torch.ones(2), torch.ones(2) * -1.5):
        assert len(compiled(x)) == len(f(x))


@pytest.mark.regression
def test_a_break_inside_iter_does_not_stand_for_the_call():
    """The frame of `__iter__`, entered by the rule of `enumerate`, was resumed as if its result were the
    call's.
    """

    class Rows:
        def __init__(self, rows):
            self.rows = rows

        def __iter__(self):
            print(end="")
            return iter(self.rows)

    def f(x, rows):
        return [x + i + v for i, v in enumerate(rows)]

    compiled, x = dynamotor.compile(f, backend=eager_backend), torch.ones(2)
    for _ in range(2):
        assert all(
            torch.equal(a, b) for a, b in zip(compiled(x, Rows([1, 2])), f(x, Rows([1, 2])), strict=True)
        )


class Asked:
    """Its truth is asked of data, and noted."""

    def __init__(self, x):
        self.x, self.times = x, 0

    def __bool__(self):
        self.times += 1
        return bool(self.x.sum() > 0)


def branch_on_data(x, asked):
    return (x + 1 if x.sum() > 0 else x - 1) * 2


def negation_of_data(x, asked):
    return x + (not (x < 0).any())


def either(x, asked):
    return (x.sum() > 0 or x.abs()) * 2


def branch_on_a_bool(x, asked):
    positive = bool(x.sum() > 0)
    x = x + 1
    return x * 2 if positive else x


def branch_by_python(x, asked):
    x = x.sin()
    return (x + 1 if asked else x - 1) * asked.times


def branch_by_python_in_a_helper(x, asked):
    return which(x * 2, asked) + asked.times


def which(x, asked):
    return x.relu() if asked else x.neg()


@pytest.mark.parametrize(
    ("fn", "traces"),
    [
        (branch_on_data, 2),  # one up to the test, one of the rest
        (negation_of_data, 2),
        (either, 2),
        (branch_on_a_bool, 2),
        (branch_by_python, None),
        (branch_by_python_in_a_helper, None),
    ],
    ids=lambda of: getattr(of, "__name__", ""),
)
def test_a_break_at_a_test_is_cut_where_the_trace_stands(fn, traces, monkeypatch):
    """The trace ran once more up to each break."""
    made, trace = [], Attempt.trace
    monkeypatch.setattr(Attempt, "trace", lambda self: made.append(self) or trace(self))
    compiled = dynamotor.compile(fn, backend="eager")
    compiled(torch.ones(3), Asked(torch.ones(3)))
    assert traces is None or len(made) == traces
    for sign in (1.0, -1.0, 2.0):
        x = torch.full((3,), sign)
        ours, theirs = Asked(x), Asked(x)
        torch.testing.assert_close(compiled(x, ours), fn(x, theirs))
        assert ours.times == theirs.times
