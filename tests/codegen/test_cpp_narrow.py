"""Maps over narrow elements: all pairs of values, ends of rows, and what needs wider vectors."""

import pytest
import torch

import dynamotor
from dynamotor.base.config import config
from dynamotor.codegen import cpp_kernel
from dynamotor.codegen.cpp_narrow import narrow_lanes

LOW_BITS = {
    "add": lambda x, y: x + y,
    "sub_and_scale": lambda x, y: (x - 3) * y,
    "logic": lambda x, y: (x & y) | ~(x ^ 5),
    "compare": lambda x, y: (x < y, x >= y, x == y, x != 7),
    "extremes": lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), x.clamp(3, 100)),
    "sign": lambda x, y: (x.sign(), y.abs(), -x),
    "choice": lambda x, y: torch.where(x > y, x, y + 1),
    "truth": lambda x, y: (torch.logical_and(x, y), torch.logical_not(x), (x > 3) ^ (y > 9)),
    "wrapped_then_compared": lambda x, y: (x + y) > x,
    "mask_to_number": lambda x, y: (x > y) * y,
    "filled": lambda x, y: x.masked_fill(y > 4, 2),
}
HALVES = {
    "moved": lambda x, y: (-x, x.abs(), torch.copysign(x, y), -x.abs()),
    "chosen": lambda x, y, m: torch.where(m, x, -y),
}


@pytest.fixture(autouse=True)
def _chosen(monkeypatch):
    """The element types that kernels took, in order."""
    chosen = []

    def choose(kernel, floats):
        found = narrow_lanes(kernel, floats)
        chosen.append(found and found.element)
        return found

    monkeypatch.setattr(cpp_kernel, "narrow_lanes", choose)
    return chosen


def pairs(dtype):
    """All pairs of values of a type of 8 bits, in rows that no vector divides."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    values = torch.arange(low, high + 1).to(dtype)
    x, y = values.repeat_interleave(256), values.repeat(256)
    return x[: 251 * 257].view(251, 257).clone(), y[: 251 * 257].view(251, 257).clone()


def same(f, *inputs, isa=""):
    with config.patch(isa=isa), torch.no_grad():
        found = dynamotor.compile(f, dynamic=False)(*inputs)
    torch.testing.assert_close(found, f(*inputs), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("name", LOW_BITS)
def test_all_pairs_of_bytes_are_as_in_eager(dtype, name, _chosen):
    same(LOW_BITS[name], *pairs(dtype))
    assert {"uint8": "u8", "int8": "i8"}[str(dtype)[6:]] in _chosen


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets_give_the_same(isa, _chosen):
    if not cpp_kernel.ISAS[isa].is_here:
        pytest.skip(f"this processor has no {isa}")
    x, y = pairs(torch.uint8)
    same(lambda x, y: (torch.maximum(x, y) - 3, x < y, -x), x, y, isa=isa)
    same(lambda x, y: (-x, torch.copysign(x, y)), x.half(), y.bfloat16().half(), isa=isa)
    assert "u8" in _chosen and "f16" in _chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_moved_and_chosen_as_bits(dtype, _chosen):
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    x = bits.view(dtype).view(256, 256).clone()  # with every NaN, infinity and subnormal number
    y = x.flip(0).contiguous()
    same(HALVES["moved"], x, y)
    same(HALVES["chosen"], x, y, torch.rand(256, 256) > 0.5)
    assert _chosen and set(_chosen) == {"bf16" if dtype is torch.bfloat16 else "f16"}


def test_short_integers(_chosen):
    x = torch.randint(-(1 << 15), 1 << 15, (7, 1003), dtype=torch.int16)
    same(lambda x, y: (x * y, torch.maximum(x, y), x > y), x, x.flip(1).contiguous())
    assert set(_chosen) == {"i16"}


def test_values_that_need_more_bits_keep_wide_vectors(_chosen):
    x, y = pairs(torch.uint8)
    same(lambda x, y: x.int() + y > 300, x, y)  # compared without wrapping
    same(lambda x, y: ((x.int() + y) // 2).to(torch.uint8), x, y)
    same(lambda x, y: x.float() + y, x, y)
    assert set(_chosen) == {None}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
def test_rows_are_joined_filled_and_turned_around(dtype, _chosen):
    x = torch.randint(0, 200, (9, 192)).to(dtype)
    same(lambda x: torch.cat([x, -x]), x)
    same(lambda x: torch.cat([x, x.flip(1)], 1), x)
    same(lambda x: torch.nn.functional.pad(x, (0, 64, 2, 1), value=3.3), x)
    same(lambda x: (x.roll(2, 0), x.index_select(0, torch.tensor([3, 8, 0])), x[:, ::2].contiguous()), x)
    assert _chosen and None not in _chosen
    same(lambda x: x.masked_fill(x.roll(1, 0).bool(), 0.1 if dtype is torch.bfloat16 else 4), x)
    same(lambda x: torch.cat([x[:, :40], x], 1), x)  # a boundary inside of a vector
    same(lambda x: x.repeat(1, 2), x)


@pytest.mark.parametrize("narrower", [torch.int8, torch.uint8], ids=str)
def test_integers_that_pass_through_narrower_types_lose_their_bits(narrower):
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    same(lambda x: (x.to(narrower).to(torch.int16), x.to(narrower) > 5), x)
    same(lambda x: ((x.to(narrower) + 200).to(torch.int16) + x, x.to(narrower).abs().to(torch.int16)), x)
    same(lambda x: torch.where(x.to(narrower) > 3, x, -x), x)


@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=str
)
def test_halves_that_pass_through_the_other_type_are_rounded(dtype, other):
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    same(lambda x: (x.to(other).to(dtype), (-x).to(other).to(dtype)), x)


def test_rows_and_scalars_are_read_beside_vectors(_chosen):
    x, y = pairs(torch.int8)
    same(lambda x, y: x + y[0] + y[:, :1], x, y)
    same(lambda x, y: torch.maximum(x, y[3, 5]), x, y)
    assert "i8" in _chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_of_each_row_fills_it_as_bits(dtype, _chosen):
    x = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1.5, 1e-7, -65504], dtype=dtype)[
        :, None
    ]
    for fill in (
        lambda x: x.expand(8, 130).clone(),
        lambda x: (-x).expand(8, 130).clone(),
        lambda x: torch.where(x.expand(8, 130) > 0, x, x.abs()),
        lambda x: torch.cat([x.expand(8, 70), x.expand(8, 71)], 1),
    ):
        got, wanted = dynamotor.compile(fill, dynamic=False)(x), fill(x)
        number = ~wanted.isnan()
        assert torch.equal(got.isnan(), ~number)
        assert torch.equal(got.view(torch.int16)[number], wanted.view(torch.int16)[number])
    assert ("bf16" if dtype is torch.bfloat16 else "f16") in _chosen


def extremes(x):
    y = x // 2
    both = torch.minimum(x, y).amax(-1), (y - 3).amax(0)
    return x.amax(), x.amin(), x.amax(0), x.amin(0), x.amax(-1), x.amin(-1), *both


ROWS = [(3, 64), (64, 64), (7, 1000), (130, 256), (5, 63), (2, 3, 128), (1, 4096), (640, 64)]


@pytest.mark.parametrize("isa", ["", "avx2", "portable"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_extremes_are_as_in_eager(dtype, shape, isa):
    if isa and not cpp_kernel.ISAS[isa].is_here:
        pytest.skip(f"this processor has no {isa}")
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.randint(low, high + 1, shape, dtype=dtype)
    for layout in (x, x.transpose(0, -1), x[:1].expand(shape), x[:, ::2], torch.full_like(x, low)):
        same(extremes, layout, isa=isa)


def test_extremes_in_pieces_for_threads_are_as_in_eager():
    x = torch.randint(-128, 128, (2048, 256), dtype=torch.int8)
    torch.set_num_threads(2)
    try:
        same(extremes, x)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dim", [(), 0, 1], ids=str)
def test_extremes_of_bytes_take_vectors_of_bytes(dim, _chosen):
    same(lambda x: x.amax(dim), torch.randint(0, 256, (512, 512), dtype=torch.uint8))
    assert "u8" in _chosen


def test_extremes_of_numbers_beyond_a_byte_do_not(_chosen):
    x = torch.randint(0, 256, (64, 256), dtype=torch.uint8)
    same(lambda x: ((x.int() * 3).amax(0), (x.int() - 9).amin(1), (x.int() + 1).amax()), x)
    assert set(_chosen) <= {None}
