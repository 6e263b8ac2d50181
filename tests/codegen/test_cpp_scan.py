"""Running extremes in C++: vectors whose elements leave the extreme as it is are stored at once; bytes and their
positions are one number.
"""

import pytest
import torch

import dynamotor

VALUES = {
    "any": lambda x: x,
    "ties": lambda x: (x * 0.7).round(),
    "ascending": lambda x: x.sort(1)[0],
    "nan": lambda x: torch.where(x > 2.5, torch.nan, x),
    "infinite": lambda x: torch.where(x > -1, -torch.inf, x),
    "zeros": lambda x: torch.where(x > 0, 0.0, -0.0),
}
FUNCTIONS = [
    lambda x: (*x.cummax(1), *x.cummin(1)),
    lambda x: (x.cummax(1)[0].float() + x, x.cummin(1)[1] * 2),
    lambda x: tuple(x[:, ::2].cummax(1)),
]


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_running_extremes_are_eagers(kind, dtype):
    for columns in (1, 7, 16, 33, 513):
        x = VALUES[kind](torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)) * 3)
        x = (x if dtype.is_floating_point else x.nan_to_num(0).clamp(-9, 9)).to(dtype)
        for function in FUNCTIONS:
            for got, want in zip(dynamotor.compile(function)(x), function(x), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
                if want.is_floating_point():
                    assert torch.equal(got.nan_to_num().signbit(), want.nan_to_num().signbit())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_running_extremes_of_whole_numbers(dtype):
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    functions = (
        *FUNCTIONS,
        lambda x: (x.cummax(1)[0], x.cummin(1)[0] + 1, x.flip(1).cummax(1)[1]),
        lambda x: (*x[:1].expand(4, -1).cummax(1), (x & 15).cummin(1), (-x).cummin(0)),
        lambda x: (*x.cummax(1), *x.cummin(1), x.cumsum(1)),
    )
    for columns in (1, 7, 16, 33, 513):
        near = torch.randint(max(low, -3), 4, (3, columns))
        far = torch.randint(max(low, -(1 << 40)), min(high, 1 << 40) + 1, (3, columns))
        far[1, ::3], far[2, ::3] = low, high
        for x in (
            near.to(dtype),
            far.to(dtype),
            far.sort(1)[0].to(dtype),
            far.sort(1, descending=True)[0].to(dtype),
        ):
            for function in functions:
                got, want = dynamotor.compile(function, dynamic=False)(x), function(x)
                for a, b in zip(
                    torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True
                ):
                    assert torch.equal(a, b)
