"""Entries that a program sets, and finds at its next call: one program serves both, and the order of a dict's
keys is eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

X = torch.arange(3.0)


@pytest.fixture(autouse=True)
def _anew() -> None:
    dynamotor.reset()


class Thing:
    def __init__(self) -> None:
        self.first = 1


def sets_attributes(thing: Any, table: dict[Any, Any], x: Any) -> Any:
    thing.seen = x + 1
    thing.again = thing.seen.shape
    return thing.seen * 2


def sets_keys(thing: Any, table: dict[Any, Any], x: Any) -> Any:
    table["b"] = x * 2
    table["a"] = 3
    return table["b"] + table["a"]


def sets_and_takes_away(thing: Any, table: dict[Any, Any], x: Any) -> Any:
    table["a"] = 1
    del table["a"]
    thing.seen = 2
    del thing.seen
    return x + len(table)


def takes_away_and_sets(thing: Any, table: dict[Any, Any], x: Any) -> Any:
    table["b"] = 0
    table["a"] = 1
    table.pop("a")
    table["a"] = 2
    return x + 1


def sets_and_counts(thing: Any, table: dict[Any, Any], x: Any) -> Any:
    table["a"] = 5
    return x + sum(n * i for i, n in enumerate(v for v in table.values() if isinstance(v, int))), list(table)


def asks_after_it_sets(thing: Any, table: dict[Any, Any], x: Any) -> Any:
    thing.again = 4
    table["a"] = 1
    return x + hasattr(thing, "again") + hasattr(thing, "nothing") + ("a" in table) + table.get("b", 7)


PROGRAMS = [
    sets_attributes,
    sets_keys,
    sets_and_takes_away,
    takes_away_and_sets,
    sets_and_counts,
    asks_after_it_sets,
]


def _state(thing: Any, table: dict[Any, Any]) -> str:
    return repr((list(vars(thing).items()), list(table.items())))


@pytest.mark.parametrize("fn", PROGRAMS)
@pytest.mark.parametrize("first", [{}, {"a": 9}, {"b": 1, "a": 2, "c": 3}, {"c": 0, "b": 1}])
def test_the_state_is_eagers_whatever_was_there(fn: Callable[..., Any], first: dict[Any, Any]) -> None:
    compiled = dynamotor.compile(fn)
    mine, eager = (Thing(), dict(first)), (Thing(), dict(first))
    for change in ({}, {}, {"b": 4}, {"a": 1}, {"c": 2}):
        for _, table in (mine, eager):
            table.update(change)
            if change == {"c": 2}:
                table.pop("a", None)
        got, want = compiled(*mine, X), fn(*eager, X)
        assert repr(got) == repr(want) and _state(*mine) == _state(*eager)


@pytest.mark.parametrize("fn", [sets_attributes, sets_keys])
def test_the_first_call_and_the_next_share_a_program(fn: Callable[..., Any]) -> None:
    compiled, thing, table = dynamotor.compile(fn), Thing(), {}
    for _ in range(3):
        compiled(thing, table, X)
    assert counters["capture"]["graphs"] == 1


def test_a_finalizer_that_comes_to_lie_there_runs_in_its_time() -> None:
    said: list[Any] = []

    class Last:
        def __del__(self) -> None:
            said.append("end")

    def run(thing: Any, x: Any) -> Any:
        thing.seen = 1
        thing.order = list(said)
        return x + 1

    compiled, thing = dynamotor.compile(run), Thing()
    compiled(thing, X)
    thing.seen = Last()
    compiled(thing, X)
    assert said == thing.order == ["end"]


class Range(torch.nn.Module):
    """Keeps the largest value so far, as layers that learn their range of quantisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("top", torch.zeros(()))
        self.register_buffer("unit", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.top
        if self.top < 5:  # data decides: the graph ends before the buffer is set
            self.top = self.top + y.max()
        return y * self.top * self.unit


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_buffer_that_is_set_behind_a_break_is_an_input_from_the_first_call(backend):
    torch.manual_seed(0)
    expected, module = Range(), Range()
    compiled = dynamotor.compile(module, backend=backend)
    x = torch.tensor([1.0, 2.0])
    before = counters["capture"]["graphs"]
    first = compiled(x), expected(x)
    captures = counters["capture"]["graphs"]
    second = compiled(x + 1), expected(x + 1)
    assert counters["capture"]["graphs"] == captures > before
    third = compiled(x - 1), expected(x - 1)  # the branch that was not taken so far
    for ours, eager in (first, second, third, (module.top, expected.top)):
        torch.testing.assert_close(ours, eager)
    module.top = expected.top = torch.tensor(-3.0)
    torch.testing.assert_close(compiled(x), expected(x))
    module.unit = torch.tensor(4.0)  # one that it only reads stays bound: this program is another
    expected.unit = torch.tensor(4.0)
    torch.testing.assert_close(compiled(x), expected(x))
