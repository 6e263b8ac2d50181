"""A residual stream in half precision: rounded less often than in eager, and than when each sum is kept."""

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def blocks(x, parts):
    """Sums that a norm and the next sum read, as in a transformer; the norms' results."""
    found = []
    for part in parts:
        x = x + part
        found.append(torch.layer_norm(x, x.shape[-1:]))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_three_sums_in_a_row_are_not_rounded(dtype):
    x, *parts = (torch.randn(64, 256).to(dtype) for _ in range(4))
    wanted = blocks(x.double(), [p.double() for p in parts])
    compiled = dynamotor.compile(blocks)(x, parts)
    for n, (got, plain, exact) in enumerate(zip(compiled, blocks(x, parts), wanted, strict=True)):
        error, eager = ((t.double() - exact).norm() / exact.norm() for t in (got, plain))
        rounded_once = (exact.to(dtype).double() - exact).norm() / exact.norm()
        assert error < 1.01 * rounded_once < 1.01 * eager, n
