"""A GPU's products of one row are sums in generated kernels, which read each weight once."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="triton is not installed")

import dynamotor
from bench.triton_interpret import available
from dynamotor.base.config import config

pytestmark = pytest.mark.skipif(not available(), reason="triton was imported without TRITON_INTERPRET=1")
GENERATOR = torch.Generator().manual_seed(0)
UP, GATE = (torch.randn(320, 256, generator=GENERATOR) / 16 for _ in range(2))
DOWN = torch.randn(256, 320, generator=GENERATOR) / 18
BIAS = torch.randn(320, generator=GENERATOR)
BYTES = torch.randint(-127, 127, (320, 256), dtype=torch.int8, generator=GENERATOR)


@pytest.fixture(autouse=True)
def _in_triton():
    with config.patch(target="triton"):
        yield


def biased(x):
    return F.linear(x, UP.to(x.dtype), BIAS.to(x.dtype)).relu()


def gated(x):
    h = F.silu(F.linear(x, GATE.to(x.dtype))) * F.linear(x, UP.to(x.dtype))
    return x + F.linear(h, DOWN.to(x.dtype))


def of_bytes(x):
    return F.linear(x, BYTES.to(x.dtype) * BIAS.to(x.dtype)[:, None])


def of_nibbles(x):
    packed = BYTES.view(torch.uint8)[:, :128]
    numbers = torch.stack([packed & 15, packed >> 4], -1).view(320, 256)
    return F.linear(x, (numbers.to(x.dtype) - 8) * BIAS.to(x.dtype)[:, None])


@pytest.mark.parametrize("function", [biased, gated, of_bytes, of_nibbles])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_eagers_error_of_float64(function, dtype):
    x = torch.randn(1, 1, 256, dtype=dtype)
    exact, eager = function(x.double()), function(x)
    ours = dynamotor.compile(function, dynamic=False)(x)
    assert (ours.dtype, ours.stride()) == (eager.dtype, eager.stride())
    assert (ours - exact).abs().max() <= 1.5 * (eager - exact).abs().max() + 1e-6 * exact.abs().max()


@pytest.mark.slow
def test_the_gate_and_the_residual_are_computed_where_the_sums_are():
    weights = [w.bfloat16() for w in (GATE, UP, DOWN)]

    def block(x, gate, up, down):
        return x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    calls = dynamotor.lower(block, torch.randn(1, 256).bfloat16(), *weights).call_program
    assert "mm" not in calls and sum("sum_dim" in line for line in calls.splitlines()) == 3
    assert "k2(" in calls and "k3(" not in calls


@pytest.mark.parametrize("rows", [2, 9])
def test_several_rows_and_weights_by_columns_go_to_the_library(rows):
    product = dynamotor.lower(lambda x, w: F.linear(x, w), torch.randn(rows, 256), UP).call_program
    by_columns = dynamotor.lower(
        lambda x, w: x @ w, torch.randn(1, 256), DOWN[:256].contiguous()
    ).call_program
    assert "mm(" in product and "mm(" in by_columns
