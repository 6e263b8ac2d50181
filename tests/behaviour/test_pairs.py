"""Operators and builtins over pairs of objects, odd ones too: a sample of all combinations, the same in each run. What
comes out, or is raised, is eager's."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
import random
import re
from typing import Any

import pytest
import torch

import dynamotor


class Less:
    v = 1

    def __lt__(self, other):
        return NotImplemented if isinstance(other, str) else self.v < getattr(other, "v", 2)

    def __eq__(self, other):
        return "eq"

    __hash__ = None


class Arithmetic:
    def __add__(self, other):
        return "add", type(other).__name__

    def __radd__(self, other):
        return "radd", type(other).__name__

    def __iadd__(self, other):
        return 5

    def __pow__(self, other, modulus=None):
        return "pow", modulus

    def __rpow__(self, other):
        return "rpow"

    def __neg__(self):
        return None

    def __matmul__(self, other):
        return NotImplemented

    def __rmatmul__(self, other):
        return "rmatmul"

    def __getitem__(self, key):
        if isinstance(key, int) and key > 2:
            raise IndexError
        return key

    def __len__(self):
        return 3

    def __contains__(self, key):
        return []

    def __call__(self, *args, **kwargs):
        return args, kwargs

    def __round__(self, digits=None):
        return "round", digits

    def __trunc__(self):
        return 7


class Whole(int):
    def __add__(self, other):
        return Whole(int(self) + 10)

    def __bool__(self):
        return False

    def __repr__(self):
        return "whole"


class Text(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


class Items(list):
    def __len__(self):
        return 7

    def __iter__(self):
        return iter([9])


class Table(dict):
    def __missing__(self, key):
        return "missing", key

    def __contains__(self, key):
        return True


class Real(float):
    def __int__(self):
        return 3


OBJECTS = [
    Less, Arithmetic, lambda: Whole(3), lambda: Text("ab"), lambda: Items([1, 2]), lambda: Table(a=1), lambda: Real(2.5),
    lambda: 3, lambda: "ab", lambda: [1, 2], lambda: (1, "b"), lambda: {"a": 1}, lambda: {1, 2}, lambda: None, lambda: 2.5,
    lambda: b"ab", lambda: range(3), lambda: 1 + 2j, lambda: True, lambda: frozenset([1]), lambda: ..., lambda: int,
    lambda: slice(1, 2),
]  # fmt: skip
NAMES = """add sub mul truediv floordiv mod pow matmul lshift and_ or_ xor lt le eq ne gt contains getitem iadd imul
    ior is_"""
OPERATIONS = [getattr(operator, name) for name in NAMES.split()] + [
    lambda a, b: b in a, lambda a, b: a in [b], lambda a, b: [a, b].count(b), lambda a, b: (a, 1) < (b, 2),
    lambda a, b: divmod(a, b), lambda a, b: max(a, b), lambda a, b: sorted([a, b]), lambda a, b: isinstance(a, type(b)),
    lambda a, b: f"{a}{b!r}", lambda a, b: str(a) + repr(b), lambda a, b: a(b), lambda a, b: getattr(a, "abc", b),
    lambda a, b: list(zip(a, b)), lambda a, b: list(itertools.chain(a, b)), lambda a, b: {**a, **b}, lambda a, b: [*a, *b],
    lambda a, b: a[:b], lambda a, b: sum(a, b), lambda a, b: round(a, b), lambda a, b: pow(a, 2, b),
    lambda a, b: list(range(a, b)), lambda a, b: min(a, default=b), lambda a, b: a.get(b, 3), lambda a, b: (any(a), all(b)),
    lambda a, b: list(enumerate(a, b)), lambda a, b: functools.reduce(operator.add, a, b), lambda a, b: {1, 2} - set(a),
    lambda a, b: (math.floor(a), math.ceil(a), int(a)), lambda a, b: (len(a), bool(a)), lambda a, b: list(reversed(a)),
    lambda a, b: {a: 1}.get(b), lambda a, b: a.startswith(b), lambda a, b: (a.append(b), a), lambda a, b: (a.pop(b), a),
    lambda a, b: operator.setitem(a, b, 1), lambda a, b: int(a, b), lambda a, b: complex(a, b),
    lambda a, b: collections.Counter(a)[b], lambda a, b: list(collections.deque(a, b)),
]  # fmt: skip
EVERY = list(itertools.product(OPERATIONS, OBJECTS, OBJECTS))
SAMPLE = random.Random(0).sample(EVERY, 240)


def outcome(function: Any, *args: Any) -> tuple[Any, ...]:
    """The result of a call, or the class of its exception."""
    result = function(torch.ones(2), *args)[1:]
    shown = result if len(result) == 1 else result[:1]
    return tuple(re.sub("0x[0-9a-f]+", "", repr(part)) for part in shown)


@pytest.mark.parametrize("part", range(8))
def test_pairs(part: int) -> None:
    for operation, first, second in SAMPLE[part::8]:

        def program(x, a, b, operation=operation):
            y = x + 1
            try:
                return y, operation(a, b)
            except Exception as error:
                return y, type(error).__name__, str(error)

        want = outcome(program, first(), second())
        got = outcome(dynamotor.compile(program, backend="eager"), first(), second())
        assert got == want, (operation, first(), second())
