"""Copies in another order: transposed tiles, rows turned round, rolled and repeated, positions of maxima."""

import pytest
import torch

import dynamotor
from dynamotor.codegen import cpp

X = torch.randn
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (70, 33), (16, 1000), (1000, 19)])
def test_transposed(rows, columns, dtype):
    x = (X(rows, columns) * 9).to(dtype)

    def function(x):
        y = x.unsqueeze(0).expand(3, -1, -1)
        return x.t().contiguous(), x.t() * 2, y.permute(2, 0, 1).contiguous()

    for got, eager in zip(dynamotor.compile(function)(x), function(x), strict=True):
        assert torch.equal(got, eager)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (70, 33), (17, 200)])
def test_every_second_column_transposed(rows, columns, dtype):
    x = (X(rows, 2 * columns) * 9).to(dtype)
    for first in (0, 1):
        function = lambda x, first=first: x[:, first::2].t().contiguous()  # noqa: E731
        assert torch.equal(dynamotor.compile(function)(x), function(x))


def test_several_transposed_operands_share_a_tile():
    x, y, z = X(4, 50, 70), X(4, 50, 70), X(70)

    def function(x, y, z):
        return (x.transpose(1, 2) * y.mT + z[:, None]).contiguous(), x.mT + y.mT.contiguous()

    for got, eager in zip(dynamotor.compile(function)(x, y, z), function(x, y, z), strict=True):
        torch.testing.assert_close(got, eager)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rolled_turned_repeated_and_padded(dtype):
    x = (X(9, 50) * 9).to(dtype)

    def function(x):
        F = torch.nn.functional
        moved = (
            x.roll(3, 1),
            x.roll((-2, 7), (0, 1)),
            x.flip(1),
            x.flip((0, 1)),
            x.repeat(2, 3),
            x.flatten().tile(2),
        )
        joined = torch.cat([x, x[:, :7], x.flip(1)], 1), F.pad(x, (3, 20)), torch.stack([x, x], 2).flatten(1)
        return *moved, *joined, x.repeat_interleave(3, 1), F.pad(x.roll(5, 1), (1, 2)).repeat(1, 2)

    for got, eager in zip(dynamotor.compile(function)(x), function(x), strict=True):
        assert torch.equal(got, eager)


def test_a_reflection_and_a_window_that_cross_boundaries():
    x = X(2, 3, 40, 37)

    def function(x):
        padded = torch.nn.functional.pad(x, (5, 6, 2, 3), mode="reflect")
        return padded, padded.unfold(3, 16, 5).contiguous(), x.roll(11, 3).view(2, 3, 40 * 37).roll(-5, 2)

    for got, eager in zip(dynamotor.compile(function)(x), function(x), strict=True):
        assert torch.equal(got, eager)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8], ids=str)
def test_transposed_rows_that_repeat_go_in_tiles(dtype):
    for shape in ((64, 64), (33, 70)):
        x = torch.rand(shape).mul(99).to(dtype)
        for move in (
            lambda x: x.t().tile(2, 1),
            lambda x: x.t().repeat(2, 3, 1),
            lambda x: (x.t().repeat(3, 1) + 1).relu(),
            lambda x: x.t().repeat_interleave(2, 0),
            lambda x: x.t().flip(0).tile(2, 1),
        ):
            assert torch.equal(dynamotor.compile(move, dynamic=False)(x), move(x))
    cpp._memo.clear()
    dynamotor.compile(lambda x: x.t().tile(2, 1), dynamic=False)(torch.rand(64, 64).to(dtype))
    assert "transpose_(" in "".join(function.source for function in cpp._memo.values())
