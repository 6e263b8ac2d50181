"""Iterators over lists, tuples and ranges that come from outside: their items are read where they stand, and they
take their steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dynamotor

x = torch.ones(2)
MAKERS = {
    "floats": lambda: iter([1.0, 2.0, 3.0, 4.0]),
    "tensors": lambda: iter([x * k for k in range(4)]),
    "tuple": lambda: iter((1.0, 2.0, 3.0)),
    "range": lambda: iter(range(2, 11, 2)),
    "empty": lambda: iter(()),
}


def two(x, it):
    return x + next(it) * next(it)


def rest(x, it):
    return [x * v for v in it], next(it, None)


def pairs(x, it):
    return [x + p * q for p, q in zip(it, it, strict=False)]


def first_two(x, it):
    return [x + v for v in itertools.islice(it, 2)]


def caught(x, it):
    try:
        return x + next(it)
    except StopIteration:
        return x - 1


def outcome(function, it):
    try:
        result = function(x, it)
    except Exception as error:
        result = type(error)
    return repr(result), repr(list(it))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("function", [two, rest, pairs, first_two, caught])
def test_items_and_what_is_left(function, make):
    compiled = dynamotor.compile(function, backend="eager")
    for skipped in (0, 1, 2, 3, 0):
        mine, theirs = make(), make()
        for it in (mine, theirs):
            next(itertools.islice(it, skipped, skipped), None)
        assert outcome(compiled, mine) == outcome(function, theirs)


def test_where_it_stands_is_no_fact():
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    compiled = dynamotor.compile(lambda x, it: x + next(it), backend=backend, fullgraph=True)
    it = iter([torch.ones(2) * k for k in range(12)])
    for k in range(12):
        assert compiled(x, it).equal(x + k)
    assert len(graphs) == 1


def test_an_iterator_that_has_ended_stays_so():
    items = [1.0]
    it = iter(items)
    dynamotor.compile(rest, backend="eager")(x, it)
    items.append(2.0)
    assert list(it) == []


@pytest.mark.parametrize("before", [True, False])
def test_the_list_changes(before):
    def changes(x, it, items):
        if before:
            items.append(7.0)
        y = x + next(it)
        if not before:
            items.insert(0, 7.0)
        return y, next(it)

    found = []
    for function in (changes, dynamotor.compile(changes, backend="eager")):
        items = [1.0, 2.0]
        it = iter(items)
        found.append((repr(function(x, it, items)), items, list(it)))
    assert found[0] == found[1]


def test_a_named_iterator_across_a_break():
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def program(x):
        it = iter(tuple(range(6)))
        x = x + next(it) + next(it)
        x.numpy().tolist()
        for v in it:
            x = x * 2 + v
        return x, list(it)

    assert repr(dynamotor.compile(program, backend=backend)(x)) == repr(program(x))
    assert len(graphs) == 2


def _appends(items: list[float], it: Iterator[float], x: torch.Tensor) -> torch.Tensor:
    items.append(5.0)
    return x * sum(it)


def _overwrites(items: list[float], it: Iterator[float], x: torch.Tensor) -> torch.Tensor:
    first = next(it)
    items[1] = 7.0
    return x * first * next(it)


@pytest.mark.parametrize("function", [_appends, _overwrites])
def test_an_iterator_may_walk_the_list_that_changes_at_a_later_call_only(function: Any) -> None:
    """Which list it walks is not guarded: `f([..], iter(other), x)`, then `f(items, iter(items), x)`."""
    compiled = dynamotor.compile(function)
    for same in (False, True, False, True):
        results = []
        for run in (function, compiled):
            items = [1.0, 2.0]
            results.append(run(items, iter(items if same else [1.0, 2.0]), torch.ones(1)))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: zip([1, 2, 3, 4], iter((4, 5, 6, 7))),
        lambda: map(lambda a, b: (a, b), [1, 2, 3], iter((4, 5, 6, 7))),
        lambda: zip(filter(lambda a: a % 2, iter(range(9))), map(abs, iter([-1, -2, -3]))),
        lambda: zip((x for x in (1, 2, 3)), [4, 5, 6]),
        lambda: zip([1, 2, 3], [4, 5, 6], strict=True),
    ],
)
@pytest.mark.parametrize("n", [1, 9])
def test_a_zip_map_or_filter_goes_on_where_it_is(make, n):
    def program(x, iterator):
        for a, b in itertools.islice(iterator, n):
            x = x * a + b
        return x

    compiled, x = dynamotor.compile(program, backend="eager"), torch.ones(1)
    for taken in (0, 1, 0):
        ours, theirs = make(), make()
        for iterator in (ours, theirs):
            list(itertools.islice(iterator, taken))
        assert compiled(x, ours) == program(x, theirs)
        assert list(ours) == list(theirs)


@pytest.mark.parametrize(
    "first, other",
    [
        ("zip()", "zip(A, B)"),
        ("zip(A)", "zip(A, B)"),
        ("zip(A, B)", "zip(A)"),
        ("zip()", "zip(A, B, strict=True)"),
        ("map(max, A, B)", "map(max, A, B, B)"),
    ],
)
def test_iterators_over_another_number_of_iterators(first: str, other: str) -> None:
    """They were those of the first call."""
    given = {"A": [1, 5], "B": [3, 4]}

    def program(x: torch.Tensor, it: Any) -> tuple[torch.Tensor, list[Any]]:
        return x + 1, list(it)

    compiled = dynamotor.compile(program, backend="eager")
    for text in (first, other, first):
        assert compiled(torch.ones(1), eval(text, given))[1] == list(eval(text, given))
