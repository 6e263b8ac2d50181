"""Functions and closures of the program."""

import functools
import types

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters


@pytest.mark.regression
def test_a_name_that_a_closure_keeps_is_deleted_once():
    def twice(x, n=2):
        for _ in range(3):

            def inner():
                return n  # noqa: F821

            del n
        return inner

    with pytest.raises(UnboundLocalError, match="'n'"):
        dynamotor.compile(twice, backend="eager")(torch.ones(1))


HELD = types.SimpleNamespace()


def scaled(n):
    def by(x):
        return x * n

    return by


@pytest.mark.parametrize(
    "program",
    [
        lambda x: (HELD.by(x), HELD.by),
        lambda x: (torch.nn.functional.new(x), torch.nn.functional.new),
        lambda x: (x * {HELD.by: 2}[HELD.by], {HELD.by: 1}.popitem()[0]),
        lambda x: (functools.partial(HELD.by)(x), HELD.by),
    ],
    ids=["an attribute", "a name of a library's module", "a key", "a partial"],
)
def test_a_closure_is_another_one_of_the_same_code(program, monkeypatch):
    """Regions that put a function in the place of a library's (`context_parallel`) make it anew each time."""
    x, compiled, before = torch.randn(3), dynamotor.compile(program), counters["capture"]["graphs"]
    for n in (2, 2, 3, 2, 3):
        monkeypatch.setattr(HELD, "by", scaled(n), raising=False)
        monkeypatch.setattr(torch.nn.functional, "new", scaled(n), raising=False)
        got, want = compiled(x), program(x)
        assert torch.equal(got[0], want[0]) and got[1] is want[1]
    assert counters["capture"]["graphs"] - before <= 2  # one for each number


def test_a_closure_of_other_code_is_seen(monkeypatch):
    def program(x):
        return torch.nn.functional.new(x)

    def negated(n):
        return lambda x: x - n

    x, compiled = torch.randn(3), dynamotor.compile(program)
    for make in (scaled, negated, scaled):
        monkeypatch.setattr(torch.nn.functional, "new", make(2), raising=False)
        assert torch.equal(compiled(x), program(x))
