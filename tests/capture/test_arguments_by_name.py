"""Arguments that are given by name where most are given by place: `round(x, ndigits=2)` forgot them, and
`zip_longest(a, b, fillvalue=0)` never came back.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor import counters

pytestmark = pytest.mark.regression

CASES: list[Callable[[torch.Tensor, int], Any]] = [
    lambda x, k: list(itertools.zip_longest([x], [x, k], fillvalue=0)),
    lambda x, k: list(itertools.zip_longest([1], [2, k])),
    lambda x, k: round(2.5674, ndigits=k),
    lambda x, k: round(number=2.5674, ndigits=None),
    lambda x, k: str(b"ab", encoding="ascii"),
    lambda x, k: str(object=3),
    lambda x, k: (pow(base=3, exp=2, mod=5), pow(2, exp=k)),
    lambda x, k: (sum([x, x], start=x), int("11", base=2), complex(real=k, imag=2)),
    lambda x, k: list(itertools.repeat(object=x, times=2)),
    lambda x, k: list(itertools.accumulate(iterable=[x, x], func=operator.add, initial=x)),
    lambda x, k: [(a, list(b)) for a, b in itertools.groupby(iterable=[1, 1, 3], key=lambda v: v > 2)],
    lambda x, k: list(itertools.compress(data=[x, 1], selectors=[0, k])),
    lambda x, k: list(itertools.permutations(iterable=[1, 2, 3], r=k)),
    lambda x, k: list(itertools.islice(itertools.count(start=2, step=3), 3)),
    lambda x, k: (copy.copy(x=[x]), copy.deepcopy(x={"a": k}), torch._assert(condition=k > 0, message="m")),
    lambda x, k: ("a,b,c".split(sep=",", maxsplit=k), math.prod([2, 3], start=k), [1, 2].index(2, 0)),
    lambda x, k: (max([1, -5], key=abs, default=0), min([], default=k), functools.reduce(max, [1, k], 0)),
]


@pytest.mark.parametrize("case", CASES)
def test_is_as_in_eager(case: Callable[[torch.Tensor, int], Any]) -> None:
    counters.clear()
    compiled = dynamotor.compile(lambda x, k: (case(x, k), x + 1), backend="eager")
    x = torch.ones(2)
    for k in (1, 2, 1):
        got, expected = compiled(x, k)[0], case(x, k)
        assert repr(got) == repr(expected)
    assert not counters["breaks"]


@pytest.mark.parametrize("call", [lambda x: round(2.5, digits=1), lambda x: pow(2, base=3, exp=1)])
def test_names_that_are_none_raise_as_in_eager(call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(TypeError) as expected:
        call(torch.ones(2))
    with pytest.raises(TypeError) as got:
        dynamotor.compile(lambda x: (x + 1, call(x)), backend="eager")(torch.ones(2))
    assert str(got.value) == str(expected.value)
