"""Float8 numbers are read from their bytes: exactly, in every kind of code, and by the products that read them."""

import pytest
import torch

import dynamotor
from dynamotor.base.config import config
from dynamotor.base.events import collect, counters
from dynamotor.lower import ops_pointwise

pytestmark = pytest.mark.filterwarnings("error::dynamotor.base.errors.EagerWarning")  # a kernel that raised
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
TARGETS = [{"isa": "portable"}, {"isa": ""}, {"target": "triton"}]


def every_number(dtype):
    return torch.arange(256).to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("target", TARGETS, ids=["portable", "native", "triton"])
def test_every_number_is_read_exactly(dtype, to, target):
    if "target" in target:
        available = pytest.importorskip("bench.triton_interpret").available
        if not available():
            pytest.skip("triton was imported without TRITON_INTERPRET=1")
    dynamotor.reset()
    x = every_number(dtype)
    with config.patch(**target, strict=True):
        got = dynamotor.compile(lambda x: (x.to(to), x.view(16, 16).t().to(to) * 1))(x)
    assert not counters["fallback"]
    want = x.to(to), x.view(16, 16).t().to(to)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == to and one.stride() == other.stride()
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5))
        numbers = ~other.isnan()
        assert torch.equal(one.signbit() & numbers, other.signbit() & numbers)


@pytest.mark.parametrize("dtype", TYPES)
def test_parts_of_a_buffer(dtype):
    x = torch.randn(9, 33).to(dtype)
    program = lambda x: (x[2:, 1::3].float().sum(0), x.t()[5].to(torch.bfloat16) + 1, x.to(torch.int32))  # noqa: E731
    torch.testing.assert_close(dynamotor.compile(program)(x), program(x))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
def test_products_read_the_weights_as_they_are(dtype, rows, of):
    w, scale = torch.randn(384, 256).to(dtype), torch.rand(384, 1)
    x = torch.randn(rows, 256).to(of)

    def program(x):
        return x @ (w.to(of) * scale.to(of)).t()

    dynamotor.reset()
    with config.patch(strict=True), torch.no_grad():
        got = dynamotor.compile(program)(x)
    want = program(x.double().to(of))
    torch.testing.assert_close(
        got, want, rtol=2e-2 if of is torch.bfloat16 else 1e-5, atol=0.3 if of is torch.bfloat16 else 1e-4
    )


def odd_numbers():
    """float32 at, and next to, each float8 number and each middle of two; ends, infinities, NaN, zeros."""
    ends = torch.cat([every_number(dtype).float() for dtype in TYPES])
    ends = ends[ends.isfinite()].unique()
    steps = torch.cat([ends, (ends[1:] + ends[:-1]) / 2])
    more = [
        449,
        463.9,
        464,
        465,
        479.9,
        480,
        500,
        57344,
        61439,
        61440,
        65535,
        65536,
        1e9,
        3e38,
        1e-40,
        torch.inf,
    ]
    steps = torch.cat([steps, torch.tensor(more), 2.0 ** torch.arange(-149.0, 128.0)])
    x = torch.cat([steps, -steps])
    return torch.cat(
        [x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(-torch.tensor(torch.inf)), x * torch.nan]
    )


def every_half(dtype):
    return torch.arange(1 << 16).to(torch.uint16).view(dtype)


OPERANDS = [odd_numbers(), every_half(torch.bfloat16), every_half(torch.float16), odd_numbers().double()]


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("x", OPERANDS, ids=lambda x: str(x.dtype))
@pytest.mark.parametrize("target", TARGETS, ids=["portable", "native", "triton"])
def test_every_number_is_rounded_as_eager_does(to, x, target):
    if "target" in target and not pytest.importorskip("bench.triton_interpret").available():
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    largest = torch.finfo(to).max

    def program(x):
        return x.to(to), x.clamp(-largest, largest).to(to), (x.float() * 0.75).to(to)

    dynamotor.reset()
    with config.patch(**target, strict=True):
        got = dynamotor.compile(program)(x)
    assert not counters["fallback"]
    for one, other in zip(got, program(x), strict=True):
        assert one.dtype == to
        numbers = ~other.float().isnan()
        assert torch.equal(one.float().isnan(), ~numbers)
        assert torch.equal(one.view(torch.uint8)[numbers], other.view(torch.uint8)[numbers])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("target", TARGETS, ids=["portable", "native", "triton"])
def test_numbers_are_rounded_and_moved_in_one_kernel(dtype, target):
    """Row-major and transposed, as products of a forward and of its backward take them."""
    if "target" in target and not pytest.importorskip("bench.triton_interpret").available():
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    x = torch.randn(96, 80)

    def program(x):
        small = (x * 0.5).to(dtype)
        return small, small.t().contiguous(), small.float() + 1

    dynamotor.reset()
    with config.patch(**target, strict=True):
        got = dynamotor.compile(program)(x)
    assert not counters["fallback"]
    for one, other in zip(got, program(x), strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        assert torch.equal(one.float(), other.float())


def test_what_has_no_kernel_is_atens():
    x = torch.randn(8)
    for program in (lambda x: x.to(torch.float8_e4m3fnuz), lambda x: x.to(torch.float8_e4m3fnuz).float()):
        torch.testing.assert_close(dynamotor.compile(program)(x).float(), program(x).float())
    z = torch.randn(4, 4, dtype=torch.complex64)
    assert torch.equal(dynamotor.compile(lambda z: z.t().clone())(z), z.t())


@pytest.mark.parametrize("to", TYPES)
def test_gpus_without_an_instruction_calculate(to, monkeypatch):
    if not pytest.importorskip("bench.triton_interpret").available():
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    monkeypatch.setattr(ops_pointwise, "has_float8", lambda device: False)
    dynamotor.reset()
    x = odd_numbers()
    with config.patch(target="triton", strict=True):
        got = dynamotor.compile(lambda x: (x * 1.0).to(to))(x)
    numbers = ~x.to(to).float().isnan()
    assert torch.equal(got.float().isnan(), ~numbers)
    assert torch.equal(got.view(torch.uint8)[numbers], x.to(to).view(torch.uint8)[numbers])


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_are_rounded_one_at_a_time_on_a_gpu(dtype):
    """ptxas 12.8 lets code that reads half of a pair run before the pair is there."""
    if not pytest.importorskip("bench.triton_interpret").available():
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    x = torch.randn(64)
    with config.patch(target="triton"), collect("code") as events:
        got = dynamotor.compile(lambda x: x.to(dtype).float() * 2)(x)
    (text,) = [e.data["triton"] for e in events]
    assert "float8_bits(" in text and "tl.float8" not in text
    torch.testing.assert_close(got, x.to(dtype).float() * 2, rtol=0, atol=0)
