"""Narrow numbers in C++ vectors, and whole numbers divided in them: equal to eager's, at the ends of their range."""

import pytest
import torch

import dynamotor

NARROW = [torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.bool]
WIDE = [torch.float32, torch.float64, torch.int32, torch.int64]


def numbers(dtype):
    """77 numbers of a type, so that vectors of each width and single elements meet some."""
    if dtype.is_floating_point:
        ends = [
            0.0,
            -0.0,
            torch.inf,
            -torch.inf,
            torch.nan,
            torch.finfo(dtype).max,
            torch.finfo(dtype).smallest_normal / 4,
        ]
        return torch.cat([torch.tensor(ends), torch.randn(70) * 50]).to(dtype)
    return torch.randint(-(1 << 62), 1 << 62, (77,)).to(dtype)


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("wide", WIDE)
def test_loads_and_stores(narrow, wide):
    for source, to in ((narrow, wide), (wide, narrow), (narrow, narrow)):
        x = numbers(source)
        if source.is_floating_point and not to.is_floating_point:
            x = x.nan_to_num(0, 100, 0).clamp(0, 100)  # others are whatever the processor gives
        got, eager = (
            dynamotor.compile(lambda x, to=to: (x.to(to), (x == x).to(to)))(x),
            (x.to(to), (x == x).to(to)),
        )
        torch.testing.assert_close(got, eager, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got[0].float().signbit()[:4], eager[0].float().signbit()[:4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_rounded_where_another_may_read_them(dtype):
    def function(x):
        y = x * 1.7
        return y, y.floor(), y.float().to(dtype), y.float() * 2

    x = numbers(dtype)
    torch.testing.assert_close(dynamotor.compile(function)(x), function(x), equal_nan=True)


def test_narrow_integers_wrap():
    def function(x):
        y = x + x
        return y, y.long() + 1, (y * y).to(torch.int8).long()

    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        x = numbers(dtype)
        assert all(map(torch.equal, dynamotor.compile(function)(x), function(x)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "divisor",
    [1, 2, 3, -3, 7, 10, -1000003, (1 << 31) - 1, -(1 << 31), 1 << 30, (1 << 62) - 1, (1 << 53) + 1],
)
def test_whole_quotients(dtype, divisor):
    most = torch.iinfo(dtype).max
    if divisor > most:
        pytest.skip("no such divisor")
    x = torch.randint(-most - 1, most, (1000,), dtype=dtype) >> torch.randint(
        0, torch.iinfo(dtype).bits, (1000,)
    ).to(dtype)
    x = torch.cat([x, torch.tensor([-most - 1, -most, most, most - 1, 0, 1, -1], dtype=dtype)])
    x = torch.cat([x, x // divisor * divisor])

    def function(x):
        return x // divisor, x % divisor, torch.div(x, divisor, rounding_mode="trunc")

    assert all(map(torch.equal, dynamotor.compile(function)(x), function(x)))


@pytest.mark.regression
@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_a_nan_that_the_compiler_knows_becomes_the_whole_number_of_the_processor(isa: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = x.mean(-1, dtype=torch.float64)
        return mean.to(torch.int64), mean.to(torch.int32)

    x = torch.zeros(0, dtype=torch.bool)
    assert dynamotor.compile(fn, options={"isa": isa})(x) == fn(x)
