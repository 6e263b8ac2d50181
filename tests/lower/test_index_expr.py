"""The algebra of positions: digits that one view takes apart and another puts together are the position itself,
and no simplification changes a value.
"""

import itertools
import math
import random

import pytest

from dynamotor.graph.spec import contiguous_stride
from dynamotor.lower.index_expr import Index, Var, flatten, unflatten

ROW, COLUMN = Var("row", 6), Var("column", 24)
R, C = Index.of(ROW), Index.of(COLUMN)


def value(index, row, column):
    """The number that an index is at one iteration."""
    found = index.subst({ROW: Index({}, row), COLUMN: Index({}, column)})
    assert not found.terms
    return found.const


@pytest.mark.parametrize(
    "digits, stride, whole",
    [
        ((C // 8, C % 8), (8, 1), C),
        ((R, C // 4, C % 4), (24, 4, 1), R * 24 + C),
        ((R, C // 8, (C // 2) % 4, C % 2), (48, 16, 4, 2), R * 48 + C * 2),
        ((C % 5, R, C // 5), (1, 100, 5), R * 100 + C),
        (((R * 24 + C) // 9, (R * 24 + C) % 9), (9, 1), R * 24 + C),
        (((C - 3) // 7, (C - 3) % 7), (7, 1), C - 3),
    ],
)
def test_digits_that_are_put_together_again_are_the_position(digits, stride, whole):
    assert flatten(digits, stride) == whole


def test_digits_of_other_weights_stay():
    for digits, stride in (((C // 8, C % 8), (9, 1)), ((C % 8, C // 8), (8, 1)), ((C // 8, C % 4), (8, 1))):
        found = flatten(digits, stride)
        assert not found.is_affine
        for row, column in itertools.product(range(6), range(24)):
            want = sum(value(d, row, column) * s for d, s in zip(digits, stride, strict=True))
            assert value(found, row, column) == want


@pytest.mark.parametrize("seed", range(40))
def test_regrouped_positions_keep_their_values(seed):
    """Through random shapes and orders of 144 elements."""
    rng = random.Random(seed)
    position, numbers = R * 24 + C, {(r, c): r * 24 + c for r in range(6) for c in range(24)}
    for _ in range(3):
        shape = rng.choice([(144,), (12, 12), (2, 72), (3, 4, 12), (16, 9), (2, 2, 36), (6, 2, 3, 4)])
        order = rng.sample(range(len(shape)), len(shape))
        stride = contiguous_stride(shape)
        moved = contiguous_stride([shape[d] for d in order])
        digits = unflatten(position, shape)
        position = flatten([digits[d] for d in order], moved)
        for at, number in numbers.items():
            coords = [number // s % n for s, n in zip(stride, shape, strict=True)]
            numbers[at] = sum(coords[d] * m for d, m in zip(order, moved, strict=True))
        assert math.prod(shape) == 144
    for (row, column), number in numbers.items():
        assert value(position, row, column) == number
