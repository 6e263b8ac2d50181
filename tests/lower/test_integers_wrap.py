"""Sums, products and negations of integers that overflow wrap, as eager's do: no comparison is decided as if
they could not.
"""

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def overflows(x):
    return (
        (x + 1) > x,
        (x * 2) // 2 == x,
        (-(x + 1)).abs() < 0,
        (-x - 1) - 1 < 0,
        (x << 1) >> 1,
        x.sum(),
        x.cumsum(0),
    )


@pytest.mark.parametrize("size", [3, 40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_wrap(dtype, size):
    x = torch.full((size,), torch.iinfo(dtype).max, dtype=dtype)
    torch.testing.assert_close(dynamotor.compile(overflows)(x), overflows(x))
