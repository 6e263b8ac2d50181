"""Real numbers that become complex ones are stored by loops."""

import pytest
import torch

import dynamotor
from dynamotor.base.config import config
from dynamotor.base.events import counters

REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]
LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::2],
    "broadcast": lambda x: x[:1].expand(67, 130),
    "contiguous": lambda x: x.t().contiguous(),
    "one": lambda x: x[0, 3],
    "none": lambda x: x[:0],
    "few": lambda x: x[:, :3],
}


def numbers(dtype):
    x = torch.randn(67, 130).mul(5).to(dtype)
    if dtype.is_floating_point:
        x[0, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-42, 7e4])
    return x


def same(got, wanted):
    assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    got, wanted = (torch.view_as_real(x) for x in (got, wanted))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() & ~got.isnan(), wanted.signbit() & ~wanted.isnan())


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_real_numbers_get_zeros_beside_them(dtype, layout):
    before = sum(counters["fallback"].values())
    for source in REAL:
        x, convert = numbers(source), lambda x: LAYOUTS[layout](x).to(dtype)
        same(dynamotor.compile(convert, dynamic=False)(x), convert(x))
    assert sum(counters["fallback"].values()) == before


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets_store_the_same(isa):
    for dtype in COMPLEX[:2]:
        x, convert = numbers(torch.float32), lambda x, dtype=dtype: (x * 2).to(dtype)
        with config.patch(isa=isa):
            same(dynamotor.compile(convert, dynamic=False)(x), convert(x))


def test_complex_numbers_are_read_by_aten():
    x = numbers(torch.float32)
    function = lambda x: (x.to(torch.complex64) * 2j, x.to(torch.complex64).t()[3:], x.cfloat().real + 1)  # noqa: E731
    got, wanted = dynamotor.compile(function, dynamic=False)(x), function(x)
    torch.testing.assert_close(got, wanted, equal_nan=True)


def test_sizes_that_change_are_converted_by_aten():
    compiled = dynamotor.compile(lambda x: x.to(torch.complex64), dynamic=True)
    for n in (3, 5, 9):
        same(compiled(torch.ones(n, 4)), torch.ones(n, 4).cfloat())
