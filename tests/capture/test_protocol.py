"""Special methods set to None, operators of tensors that a program replaces, sets of sets' subclasses, iterators' own methods."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from children import run_forked

import dynamotor


def without(name: str, **more: Any) -> Any:
    """An instance of a class that sets a special method to None."""
    return type("Lacking", (), {name: None, **more})()


NO_BOOL, NO_LEN, NO_EQ, NO_ADD, NO_RADD = map(
    without, ("__bool__", "__len__", "__eq__", "__add__", "__radd__")
)
NO_CONTAINS, NO_CALL, NO_HASH, NO_INDEX = map(without, ("__contains__", "__call__", "__hash__", "__index__"))
NO_ITER = without("__iter__", __getitem__=lambda self, i: i)
NO_STR, NO_ENTER = without("__str__"), without("__enter__", __exit__=None)


def enters() -> None:
    with NO_ENTER:
        pass


NONE_CASES = {
    "bool": lambda: 1 if NO_BOOL else 2,
    "length": lambda: len(NO_LEN),
    "truth by length": lambda: bool(NO_LEN),
    "equality": lambda: NO_EQ == 1,
    "reflected equality": lambda: 1 == NO_EQ,  # noqa: SIM300
    "inequality": lambda: NO_EQ != 1,
    "sum": lambda: NO_ADD + 1,
    "reflected sum": lambda: 1 + NO_RADD,
    "membership": lambda: 1 in NO_CONTAINS,
    "call": lambda: NO_CALL(),
    "callable": lambda: callable(NO_CALL),
    "hash": lambda: {NO_HASH: 1},
    "index": lambda: [1, 2][NO_INDEX],
    "iteration": lambda: list(NO_ITER),
    "membership by iteration": lambda: 1 in NO_ITER,
    "text": lambda: str(NO_STR),
    "with": enters,
}


def outcome(function: Any) -> str:
    try:
        return str(function(torch.ones(3)))
    except TypeError as error:
        return f"TypeError: {error}"


@pytest.mark.parametrize("name", NONE_CASES)
def test_a_method_that_is_none_refuses(name: str) -> None:
    use = NONE_CASES[name]

    def function(x: torch.Tensor) -> Any:
        return x + 1, use()

    assert outcome(dynamotor.compile(function, backend="eager")) == outcome(function)


class Own(set):
    def __iter__(self) -> Any:
        return iter([7, 8])


@pytest.mark.parametrize(
    "use",
    [
        lambda: set(Own([1, 2])),
        lambda: frozenset(Own([1, 2])),
        lambda: sorted({1} | Own([2])),
        lambda: {1}.issuperset(Own([1])),
        lambda: list(Own([1])),
    ],
)
def test_a_set_takes_the_items_of_a_subclass_as_they_are(use: Any) -> None:
    def function(x: torch.Tensor) -> Any:
        return x + 1, use()

    assert outcome(dynamotor.compile(function, backend="eager")) == outcome(function)


def steps(make: Any, *methods: str) -> Any:
    it = make()
    return next(it), *(getattr(it, name)() for name in methods), list(it)


@pytest.mark.parametrize(
    "use",
    [
        lambda: steps(lambda: iter([1, 2, 3]), "__length_hint__"),
        lambda: steps(lambda: reversed([1, 2, 3]), "__length_hint__"),
        lambda: steps(lambda: iter((1, 2)), "__length_hint__"),
        lambda: steps(lambda: iter({1: 2, 3: 4}), "__length_hint__"),
        lambda: steps(lambda: iter(range(3)), "__length_hint__"),
    ],
)
def test_methods_of_iterators_made_inside(use: Any) -> None:
    def function(x: torch.Tensor) -> Any:
        return x + 1, use()

    assert outcome(dynamotor.compile(function, backend="eager")) == outcome(function)


@pytest.mark.parametrize(
    "use",
    [
        lambda a: (a.dtype == np.uint8, np.uint8 == a.dtype, a.dtype != np.uint8),
        lambda a: (a.dtype == float, a.dtype in (np.float64, np.float32), a.dtype in [int, np.float64]),
        lambda a: (a.dtype < np.float64, a.dtype.type == np.uint8, a.dtype == np.floating),
    ],
)
def test_a_dtype_of_numpy_beside_a_class(use: Any) -> None:
    for array in (np.ones(2), np.ones(2, np.uint8)):
        assert outcome(dynamotor.compile(lambda x: use(array))) == outcome(lambda x: use(array))  # noqa: B023


def _fill(self: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.full((3,), 77.0)


@pytest.mark.parametrize(
    ("name", "new", "function"),
    [
        ("__add__", _fill, lambda x: x + 1),
        ("__radd__", _fill, lambda x: 1 + x),
        ("__iadd__", _fill, lambda x: operator.iadd(x.clone(), 1)),
        ("__lt__", _fill, lambda x: x < 1),
        ("__neg__", _fill, lambda x: -x),
        ("__len__", lambda self: 5, lambda x: x * len(x)),
        ("__iter__", lambda self: iter([1.0, 2.0]), lambda x: sum(x)),
        ("__bool__", lambda self: False, lambda x: x + 1 if x.sum() > 0 else x - 1),
    ],
)
def test_operators_of_tensors_that_are_replaced(
    name: str, new: Any, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = dynamotor.compile(function)
    x = torch.ones(3)
    for patched in (False, True, False):
        with monkeypatch.context() as patch:
            if patched:
                patch.setattr(torch.Tensor, name, new)
            expected, found = function(x), compiled(x)
        assert str(found) == str(expected)


@pytest.mark.slow
def test_indexing_of_tensors_that_is_replaced() -> None:
    """In a process of its own: CPython leaves the class a slot of sequences, and `torch.tensor([x])` asks `x` for a
    length from then on."""
    done = run_forked("""
        import torch, dynamotor
        compiled, x = dynamotor.compile(lambda x: x[0]), torch.ones(3)
        assert compiled(x) == 1
        torch.Tensor.__getitem__ = lambda x, index: torch.full((3,), 77.0)
        assert compiled(x).tolist() == [77.0] * 3
        del torch.Tensor.__getitem__
        assert compiled(x) == 1
        print("right")
    """)
    assert done.stdout == "right\n", done.stderr
