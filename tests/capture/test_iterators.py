"""Iterators that a trace makes and the program keeps: they have eager's class, stand where eager's stand, and
containers are read when eager reads them.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

ITEMS, TABLE = [10, 20, 30, 40], {1: 2, 3: 4, 5: 6}
MAKERS: list[Callable[[], Any]] = [
    lambda: itertools.chain([1, 2], [3, 4]),
    lambda: itertools.repeat(2, 3),
    lambda: iter([3, 2, 1].pop, 1),
    lambda: (i for i in range(3)),
    lambda: map(abs, [1, -2, 3]),
    lambda: itertools.tee([1, 2, 3])[0],
    lambda: itertools.groupby([1, 1, 2]),
    lambda: enumerate([4, 5, 6]),
    lambda: reversed(ITEMS),
    lambda: reversed((1, 2, 3)),
    lambda: reversed(TABLE),
    lambda: iter(TABLE.items()),
    lambda: iter(range(3)),
    lambda: iter("abc"),
]


def kept(x: torch.Tensor, make: Callable[[], Any], box: Any) -> torch.Tensor:
    box.it = make()
    return x + 1


def begun(x: torch.Tensor, make: Callable[[], Any], box: Any) -> torch.Tensor:
    it = make()
    box.seen = str(next(it, None))[:3]
    print(end="")
    box.it = it
    return x + 1


def walked(x: torch.Tensor, make: Callable[[], Any], box: Any) -> torch.Tensor:
    it = make()
    box.seen = [str(item)[:3] for item in it]
    box.it = it
    return x + 1


def left(function: Any, make: Callable[[], Any]) -> tuple[Any, ...]:
    box = types.SimpleNamespace()
    function(torch.ones(2), make, box)
    ITEMS.append(5)
    rest = [str(item)[:3] for item in box.it]
    ITEMS.pop()
    return type(box.it), getattr(box, "seen", None), rest


@pytest.mark.parametrize("function", [kept, begun, walked])
def test_class_and_place(function: Any) -> None:
    for make in MAKERS:
        assert left(dynamotor.compile(function, backend="eager"), make) == left(function, make)


class Named(dict):
    pass


class Listed(list):
    pass


def ordered(x: torch.Tensor) -> tuple[Any, ...]:
    made = OrderedDict(a=1)
    return made, made.keys(), made.items(), iter(made.values())


def named(x: torch.Tensor) -> tuple[Any, ...]:
    made = Named(a=1)
    return made, made.keys(), made.items(), iter(made.values())


def listed(x: torch.Tensor) -> tuple[Any, ...]:
    made = Listed([1, 2])
    return made, iter(made), reversed(made)


def attributes(x: torch.Tensor) -> tuple[Any, ...]:
    made = types.SimpleNamespace(a=1)
    return made.__dict__, made, vars(made).items()


def keywords(x: torch.Tensor) -> tuple[Any, ...]:
    made = functools.partial(dict, a=1)
    return made.keywords, made, made.keywords.keys()


def attributes_of_a_function(x: torch.Tensor) -> tuple[Any, ...]:
    def made() -> None: ...

    made.a = 1  # type: ignore[attr-defined]
    return made.__dict__, made.__dict__.keys()


def _items(over: Any) -> Any:
    if callable(over):
        return over()
    return vars(over) if hasattr(over, "a") else list(over)


@pytest.mark.parametrize("function", [ordered, named, listed, attributes, keywords, attributes_of_a_function])
def test_what_is_over_an_object_made_inside_follows_it(function: Any) -> None:
    """They were over a copy of its contents."""

    def seen(function: Any) -> list[Any]:
        first, *rest = function(torch.ones(2))
        if isinstance(first, list):
            first[0] = 9
        else:
            first["a"] = 9
        before = [list(rest.pop())] if type(rest[-1]).__name__ == "odict_iterator" else []
        if isinstance(first, list):
            first.append(5)
        else:
            first["b"] = 5
        return before + [(type(over), _items(over)) for over in rest[:2]]

    assert seen(dynamotor.compile(function, backend="eager")) == seen(function)


def test_groups_and_tees_take_items_when_they_are_asked_for() -> None:
    log: list[Any] = []

    def items(n: int) -> Any:
        for i in range(n):
            log.append(i)
            yield i

    def f(x: torch.Tensor) -> Any:
        groups = itertools.groupby(items(5), lambda i: log.append("key") or i // 2)
        _, first = next(groups)
        a = next(first)
        _, second = next(groups)
        one, two = itertools.tee(items(4))
        b = next(one), next(one)
        log.append("between")
        return x + 1, a, list(first), list(second), b, list(two), list(one)

    expected, told = f(torch.ones(2)), log.copy()
    log.clear()
    assert str(dynamotor.compile(f, backend="eager", fullgraph=True)(torch.ones(2))) == str(expected)
    assert log == told


CHANGES: list[Callable[[Any], Any]] = [
    lambda d: d.__setitem__("m", 9),
    lambda d: d.__setitem__("new", 5),
    lambda d: d.pop("m"),
    lambda d: d.clear(),
    lambda d: d.move_to_end("a") if isinstance(d, OrderedDict) else None,
]
WALKS: list[Callable[[Any], Any]] = [
    iter,
    reversed,
    lambda d: iter(d.items()),
    lambda d: reversed(d.values()),
]


def changed_behind(x: torch.Tensor, d: Any, walk: Any, change: Any, taken: int, box: Any) -> torch.Tensor:
    it = walk(d)
    box.seen = [next(it, None) for _ in range(taken)]
    change(d)
    box.it = it
    return x + 1


def changed_before(x: torch.Tensor, d: Any, walk: Any, change: Any, taken: int, box: Any) -> torch.Tensor:
    change(d)
    it = walk(d)
    box.seen = [next(it, None) for _ in range(taken)]
    box.it = it
    return x + 1


def changed_inside(x: torch.Tensor, d: Any, walk: Any, change: Any, taken: int, box: Any) -> torch.Tensor:
    box.seen = []
    for item in walk(d):
        box.seen.append(item)
        if taken % 2:
            print(end="")  # breaks the graph inside the loop
        if len(box.seen) * 2 > taken:
            change(d)
    return x + 1


def rest(function: Any, *given: Any) -> list[Any]:
    box = types.SimpleNamespace(it=iter(()))
    found = []
    try:
        function(torch.ones(2), *given, box)
        found += [str(type(box.it)), *box.it]
    except RuntimeError as error:
        found.append(repr(error))
    return [box.seen, found, list(given[0].items())]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("function", [changed_behind, changed_before, changed_inside])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_over_a_dict_that_changes(function: Any, kind: Any) -> None:
    for walk, change, taken in itertools.product(WALKS, CHANGES, (0, 1, 3, 6)):
        expected = rest(function, kind(a=1, m=2, z=3), walk, change, taken)
        compiled = dynamotor.compile(function, backend="eager")
        assert rest(compiled, kind(a=1, m=2, z=3), walk, change, taken) == expected


class Odd:
    """No iterable, or one whose iterator cannot be had."""


class Unwilling:
    def __iter__(self) -> Any:
        raise ValueError("not now")


REFUSED: list[Callable[[list[int]], Any]] = [
    lambda items: itertools.islice(items, 1.5),  # type: ignore[arg-type]
    lambda items: itertools.islice(items, 0, 2, 0),
    lambda items: itertools.repeat(2, 1.5),  # type: ignore[arg-type]
    lambda items: itertools.combinations(items, -1),
    lambda items: itertools.accumulate(5),  # type: ignore[arg-type]
    lambda items: itertools.zip_longest(items, 5),  # type: ignore[arg-type]
    lambda items: itertools.count("a"),  # type: ignore[type-var]
    lambda items: enumerate(items, 1.5),  # type: ignore[arg-type]
    lambda items: zip(items, 5),  # type: ignore[arg-type]
    lambda items: map(len, 5),  # type: ignore[arg-type]
    lambda items: itertools.product(items, repeat=2),  # this and the next read their items at the call
    lambda items: itertools.permutations(items),
    lambda items: itertools.combinations(items, 2),
    lambda items: itertools.islice(items, None, None, 2),
    itertools.chain.from_iterable,
    lambda items: itertools.chain.from_iterable(5),  # type: ignore[arg-type]
    lambda items: itertools.chain(items, Odd()),  # type: ignore[arg-type]  # refused when it is its turn
    *[
        functools.partial(lambda make, odd, items: make(iter(items), odd()), make, odd)
        for odd in (Odd, Unwilling, lambda: torch.tensor(1.0))
        for make in (
            itertools.zip_longest,
            itertools.compress,
            lambda items, odd: itertools.compress(items, selectors=odd),
            lambda items, odd: itertools.accumulate(odd),
            lambda items, odd: itertools.starmap(max, odd),
            lambda items, odd: itertools.takewhile(bool, odd),
            lambda items, odd: itertools.filterfalse(None, odd),
            lambda items, odd: itertools.groupby(iterable=odd),
            lambda items, odd: itertools.pairwise(odd),
            lambda items, odd: itertools.cycle(odd),
            lambda items, odd: itertools.tee(odd)[0],
        )
    ],
]


def made_and_walked(x: torch.Tensor, make: Any, seen: list[Any]) -> torch.Tensor:
    items = [1, 2]
    try:
        it = make(items)
        items.append(3)
    except (TypeError, ValueError) as error:
        seen.append(repr(error))
        it = iter("refused")
    try:
        seen.append(list(it))
    except TypeError as error:
        seen.append(repr(error))
    return x + 1


def test_what_is_refused_raises_at_the_call() -> None:
    for make in REFUSED:
        expected: list[Any] = []
        made_and_walked(torch.ones(2), make, expected)
        found: list[Any] = []
        dynamotor.compile(made_and_walked, backend="eager")(torch.ones(2), make, found)
        assert found == expected


@pytest.mark.parametrize(
    "make, walk, change",
    [
        (lambda: [1, 2, 3], reversed, lambda items: items.__setitem__(0, 7)),
        (lambda: [1, 2, 3], reversed, lambda items: items.clear()),
        (lambda: {1, 2, 3}, iter, lambda items: items.add(7)),
        (lambda: {1, 2, 3}, iter, lambda items: items.discard(3)),
    ],
)
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_over_a_list_or_set_that_changes_behind_a_break(
    make: Any, walk: Any, change: Any, taken: int
) -> None:
    def function(x: torch.Tensor, items: Any) -> Any:
        seen = []
        for item in walk(items):
            seen.append(item)
            print(end="")
            if len(seen) == taken:
                change(items)
        return x + 1, seen

    found = []
    for run in (function, dynamotor.compile(function, backend="eager")):
        try:
            found.append(str(run(torch.ones(2), make())))
        except RuntimeError as error:
            found.append(repr(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["count", "accumulate", "chain", "cycle", "repeat"])
def test_an_iterator_without_an_attribute_says_where_it_comes_from(name: str) -> None:
    def f(x: torch.Tensor) -> str:
        try:
            return str(getattr(itertools, name)([1]).nonesuch)
        except (AttributeError, TypeError) as error:
            return str(error)

    assert dynamotor.compile(f, backend="eager")(torch.ones(1)) == f(torch.ones(1))


def ended(x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    """What C's iterators do where the function that they call raises StopIteration."""
    found: list[Any] = []

    def taking(*items: Any) -> Callable[..., Any]:
        iterator = iter(items)
        return lambda *args: next(iterator)

    found += [[*map(taking(5, 6), range(3)), 9], list(filter(taking(0, 1), range(4)))]
    found += [sum(map(taking(5, 6), range(3))), dict.fromkeys(map(taking(7), range(2)))]
    for value in map(taking(5), range(2)):
        found.append(value)
    found += [list(iter(taking(3), 9)), list(itertools.starmap(taking(7), [(1,), (2,)]))]
    found += [
        list(itertools.takewhile(taking(True), range(3))),
        list(itertools.dropwhile(taking(True), range(3))),
    ]
    found += [list(itertools.accumulate(range(3), taking(7))), list(zip(range(3), map(taking(7), range(2))))]
    found += [list(itertools.filterfalse(taking(0, 1), range(4))), max(map(taking(7), range(2)))]
    for call in (
        lambda: sorted(range(3), key=taking(7)),
        lambda: functools.reduce(taking(7), range(4)),
        lambda: tuple(taking()() for _ in range(3)),
        lambda: next(map(taking(), range(3))),
    ):
        try:
            found.append(call())
        except (StopIteration, RuntimeError) as error:
            found.append(type(error))
    return x + 1, found


def test_a_function_that_raises_stop_iteration_ends_the_iterator_that_calls_it() -> None:
    compiled = dynamotor.compile(ended, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2))[1] == ended(torch.ones(2))[1]
