"""Lists, dicts and sets behave as in CPython."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor


@pytest.mark.regression
@pytest.mark.parametrize("position", [1.5, "a", None, True, -1])
def test_positions_and_counts_of_lists_are_whole_numbers(position: Any) -> None:
    def fn(x: torch.Tensor) -> Any:
        items, queue, errors = [1, 2, 3], deque([1, 2, 3]), []
        for change in (queue.rotate, items.pop, lambda at: items.insert(at, 7)):
            try:
                change(position)
            except TypeError as error:
                errors.append(str(error))
        return x + len(errors), items, [*queue], errors

    x = torch.zeros(2)
    found, wanted = dynamotor.compile(fn, backend="eager")(x), fn(x)
    assert found[1:] == wanted[1:] and torch.equal(found[0], wanted[0])


def eager_backend(gm, example_inputs):
    return gm.forward


@pytest.mark.regression
def test_equal_keys_keep_the_first():
    compiled = dynamotor.compile(
        lambda x: (list({True: 1, 1: x}), x + 1),  # noqa: F601
        backend=eager_backend,
        fullgraph=True,
    )
    assert compiled(torch.ones(1))[0][0] is True


@pytest.mark.regression
def test_a_set_is_looked_for_as_its_items():
    compiled = dynamotor.compile(
        lambda x, s: (x + 1, {1, 2} in s, s.discard({3})), backend=eager_backend, fullgraph=True
    )
    assert compiled(torch.ones(1), {frozenset({1, 2}), 5})[1] is True


@pytest.mark.regression
def test_a_set_that_grows_while_it_is_walked() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        kinds = {1, 2}
        for kind in kinds:
            kinds.add(kind + 10)
        return x

    with pytest.raises(RuntimeError, match="Set changed size during iteration"):
        dynamotor.compile(function)(torch.ones(2))


class Words(set):
    pass


class Frozen(frozenset):
    pass


def unbound(x: torch.Tensor, other: Any) -> Any:
    return (
        x + 1,
        set.__eq__({1, 2}, other),
        frozenset.__le__(frozenset((1,)), other),
        set.__rsub__({1}, other),
    )


def slice_of_a_deque(x: torch.Tensor, other: Any) -> Any:
    items, letters = deque(other), map(str, other)
    try:
        items[:0] = letters  # refused before an item is taken
    except TypeError as error:
        return x + 1, str(error), list(letters)
    return x, "", []


@pytest.mark.regression
@pytest.mark.parametrize("program", [unbound, slice_of_a_deque])
@pytest.mark.parametrize("other", [Words([1, 5]), Frozen([1]), {1, 2}], ids=["words", "frozen", "set"])
def test_operands_and_indices_are_those_of_c(program: Callable[..., Any], other: Any) -> None:
    x = torch.ones(1)
    assert dynamotor.compile(program, backend="eager")(x, other)[1:] == program(x, other)[1:]


@pytest.mark.parametrize("method", ["isdisjoint", "issuperset", "issubset"])
@pytest.mark.parametrize("items", [{1, 5}, frozenset((1, 2, 3)), {7}])
def test_relations_of_sets_leave_in_an_iterator_what_they_did_not_need(items: Any, method: str) -> None:
    """`isdisjoint` and `issuperset` took every item of it."""

    def program(x: torch.Tensor) -> Any:
        it = itertools.chain([1], [2, 3])
        return x + 1, getattr(items, method)(it), list(it), getattr(items, method)([1, 5, 1])

    x = torch.ones(2)
    assert dynamotor.compile(program, backend="eager", fullgraph=True)(x)[1:] == program(x)[1:]


@pytest.mark.regression
@pytest.mark.parametrize(
    "method", ["symmetric_difference_update", "intersection_update", "difference_update", "update"]
)
@pytest.mark.parametrize("makes", [reversed, iter, lambda b: (n for n in b), lambda b: map(abs, b)])
def test_an_iterator_that_changes_a_set_of_the_caller_is_used_once(
    method: str, makes: Callable[..., Any]
) -> None:
    def fn(a: set[int], b: Any) -> Any:
        items = makes(b)
        getattr(a, method)(items)
        return a, list(items)

    compiled = dynamotor.compile(fn, backend="eager")
    for _ in range(2):
        assert compiled({1, 2}, [2, 5, 2]) == fn({1, 2}, [2, 5, 2])


@pytest.mark.regression
def test_views_of_an_ordered_dict_have_types_of_their_own() -> None:
    def fn(d: Any) -> Any:
        made = OrderedDict(a=1)
        return [type(v).__name__ for o in (d, made) for v in (o.keys(), o.values(), o.items())]

    for d in ({"a": 1}, OrderedDict(a=1)):
        assert dynamotor.compile(fn, backend="eager")(d) == fn(d)
