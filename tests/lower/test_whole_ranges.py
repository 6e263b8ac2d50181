"""Integers of few bits become halves without a rounding; those of more are rounded."""

import pytest
import torch

import dynamotor
from dynamotor.lower.index_expr import Index
from dynamotor.lower.ir import F32, I32, cast, const, load, op, round_to, select
from dynamotor.lower.whole_ranges import range_of

AT = Index({}, 0)
BYTE, SIGNED, SHORT = (load(n, AT, t) for n, t in (("a", torch.uint8), ("b", torch.int8), ("c", torch.int16)))
INTS = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool


def number(n):
    return const(n, I32)


@pytest.mark.parametrize(
    "value, found",
    [
        (BYTE, (0, 255)),
        (op("sub", op("and", BYTE, number(15)), number(8)), (-8, 7)),
        (op("and", SIGNED, number(-16)), None),
        (op("shr", SIGNED, number(4)), (-8, 7)),
        (op("mul", SIGNED, SIGNED), (-127 * 128, 128 * 128)),
        (op("shr", op("mul", op("mul", SHORT, SHORT), SHORT), number(40)), None),
        (round_to(op("add", SIGNED, BYTE), torch.int8), (-128, 127)),
        (cast(load("f", AT, torch.float32), I32), None),
    ],
    ids=str,
)
def test_ranges_follow_from_memory_types(value, found):
    assert range_of(value) == found


def test_only_numbers_that_a_half_may_not_hold_are_rounded():
    for x, memory, exact in (
        (BYTE, torch.bfloat16, True),
        (SIGNED, torch.float16, True),
        (SHORT, torch.float16, False),
        (op("add", BYTE, BYTE), torch.bfloat16, False),
        (op("add", BYTE, BYTE), torch.float16, True),
    ):
        value = cast(x, F32)
        assert (round_to(value, memory) is value) == exact
    chosen = select(op("lt", BYTE, number(3), dtype=torch.bool), BYTE, SIGNED)
    assert range_of(chosen) == (-128, 255)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers_as_halves_are_those_of_eager(half, dtype):
    x = torch.arange(-40000, 40000).to(dtype).repeat_interleave(2)[1:]

    def f(x):
        y = x & 1 if dtype is torch.bool else (x & 15) - 8
        z = x if dtype is torch.bool else x >> 4
        return x.to(half), y.to(half) * 3, z.to(half).float(), (x + x).to(half).to(torch.float32)

    for a, b in zip(dynamotor.compile(f)(x), f(x), strict=True):
        assert torch.equal(a, b)
