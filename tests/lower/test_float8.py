"""Float8 numbers are read from their bytes: exactly, in every kind of code, and by the products that read them."""

import pytest
import torch

import dynamotor
from dynamotor.base.config import config
from dynamotor.base.events import counters

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


def test_what_has_no_kernel_is_atens():
    x = torch.randn(8)
    for program in (lambda x: x.to(torch.float8_e4m3fn), lambda x: x.to(torch.float8_e4m3fnuz).float()):
        torch.testing.assert_close(dynamotor.compile(program)(x), program(x))
