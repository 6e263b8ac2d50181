"""Enums and subclasses of numbers beside other numbers."""

from __future__ import annotations

import enum
import operator

import pytest

import dynamotor


def eager_backend(gm, example_inputs):
    return gm.forward


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Half(float, enum.Enum):
    VALUE = 0.5


class Letter(enum.StrEnum):
    A = "a"


class Whole(int):
    pass


@pytest.mark.regression
@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "op",
    [
        *(operator.lt, operator.gt, operator.le, operator.ge, operator.eq, operator.ne, operator.add),
        *(operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
        *(operator.and_, operator.contains, divmod),
    ],
)
def test_numbers_of_enums_and_subclasses_meet_those_of_other_types(op):
    """`Level.LOW == 1.0` was false, and `Level.LOW < 1.5` and `"a" * Whole(3)` raised."""
    values = [
        Level.LOW,
        Level.HIGH,
        Half.VALUE,
        Whole(3),
        "a",
        3,
        1.5,
        1.0,
        True,
        [1.0],
        (3,),
        {1: 2},
    ]

    def outcome(run, *args):
        try:
            return repr(run(*args))
        except Exception as error:
            return type(error), str(error)

    def each(op, left):
        return [outcome(op, left, right) for right in values], left == Letter.A, Letter.A + "a"

    compiled = dynamotor.compile(each, backend=eager_backend)
    with dynamotor.config.patch(cache_size_limit=1000):
        for left in values:
            assert compiled(op, left) == each(op, left), (op, left)
