"""Views, joins, pads and factories: index arithmetic without memory of its own."""

import pytest
import torch
import torch.nn.functional as F
from harness import check

import dynamotor

X = torch.randn(4, 6, 10)

VIEWS = {
    "reshape": lambda x: x.reshape(24, 10),
    "reshape across": lambda x: x.permute(2, 0, 1).reshape(40, 6),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, 2),
    "expand": lambda x: x[:, :1].expand(4, 6, 10),
    "slice": lambda x: x[1:3, ::2, 3:9],
    "select": lambda x: x[2, :, -1],
    "squeeze": lambda x: x[:, :1].squeeze(1).unsqueeze(0),
    "flip": lambda x: x.flip(0, 2),
    "diagonal": lambda x: x.diagonal(1, 1, 2),
    "unfold": lambda x: x.unfold(2, 4, 3),
    "roll": lambda x: x.roll((1, -3), (0, 2)),
    "view split": lambda x: x.view(2, 2, 2, 3, 10),
    "chunk": lambda x: x.chunk(3, 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_inputs_and_of_computed_values(name):
    f = VIEWS[name]
    check(lambda x: f(x) * 2 + 1, X)
    check(lambda x: f(x * 2 + 1) - 0.5, X)
    check(lambda x: f(torch.exp(x)).clone(), X, tolerance=1e-5)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_cat_and_stack(dim):
    a, b, c = torch.randn(4, 16, 32), torch.randn(4, 16, 32), torch.randn(4, 16, 32)
    check(
        lambda a, b, c: (torch.cat([a, b * 2, c], dim), torch.stack([a, b + 1], dim)), a, b, c, fallbacks=None
    )


def test_cat_of_other_sizes_and_dtypes():
    a, b = torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    check(lambda a, b: torch.cat([a, b + 1], 1), a, b)
    check(lambda a, b: torch.cat([a, b.double()], 1), a, b, fallbacks=None)
    check(lambda a, b: torch.cat([-b[..., 16:], b[..., :16]], -1) * 2, a, b)  # rotary embedding


@pytest.mark.parametrize("pad", [(1, 2), (0, 3, 2, 0), (-1, 2, 1, -2), (1, 1, 1, 1, 1, 1)])
def test_constant_pad(pad):
    check(lambda x: F.pad(x, pad, value=2.5) * 2, X)


def test_slices_written_into_a_tensor():
    x, y = torch.randn(5, 20), torch.randn(5, 7)
    check(lambda x, y: torch.slice_scatter(x, y, 1, 3, 10) + 1, x, y)
    check(lambda x, y: torch.select_scatter(x, y[:, 0], 1, 4), x, y)


def test_factories():
    x = torch.randn(3, 17)
    check(
        lambda x: (
            torch.zeros_like(x) + x,
            torch.full((2, 5), 3.5),
            torch.arange(0, 34, 2) * 3,
            torch.ones(4, dtype=torch.int32),
            torch.arange(1.0, 2.0, 0.125),
            torch.eye(4),
            x.new_full((2,), 7.0),
        ),
        x,
        fallbacks=None,
    )


@pytest.mark.parametrize("diagonal", [-2, 0, 1])
def test_triangles_and_masks(diagonal):
    x = torch.randn(3, 20, 33)
    check(
        lambda x: (
            x.tril(diagonal),
            torch.triu(x, diagonal) * 2,
            x.masked_fill(torch.ones(20, 33, dtype=torch.bool).tril(diagonal), -1.0),
        ),
        x,
    )


def test_as_strided_inside_its_operand():
    x = torch.randn(4, 16)
    check(lambda x: torch.as_strided(x, (3, 8), (16, 2), 1) * 2, x)


def test_strided_reads_and_writes_count_from_the_operand_not_from_scratch_memory():
    x, y = torch.randn(6, 8), torch.randn(4, 8)

    def fn(x, y):
        z = torch.exp(x)
        filled = torch.as_strided_scatter(torch.tanh(x).view(48), y, (4, 8), (8, 1), 8)
        strided = torch.as_strided_scatter(torch.sigmoid(x), y[:3], (3, 8), (16, 1), 8)
        return filled * 2, strided, torch.as_strided(z * 2, (4, 4), (8, 2), 3) + 1, (z @ z.t()).sum()

    check(fn, x, y, fallbacks=None, tolerance=1e-5)


def test_repeat():
    check(lambda x: x.repeat(2, 1, 3) + 1, X)


def test_empty_tensors():
    x = torch.randn(0, 5)
    check(lambda x: (x * 2 + 1, x.sum(0), torch.cat([x, x], 0)), x, fallbacks=None)


def test_outputs_keep_eagers_strides():
    x = torch.randn(2, 8, 5, 6).to(memory_format=torch.channels_last)
    check(lambda x: (x * 2, (x + 1).permute(0, 2, 3, 1), x.transpose(1, 2) - 1), x)


def test_a_padded_view_is_read_without_divisions():
    x = torch.randn(4, 6, 25)
    (text,) = check(lambda x: F.pad(x.view(24, 25), (0, 7)) + 1, x)
    assert "//" not in text and "%" not in text
    check(lambda x: torch.cat([x.view(24, 25) * 2, x.view(24, 25)[:, 3:] - 1], 1), x, fallbacks=None)
    check(lambda x: F.pad(F.pad(x.view(24, 25), (3, 5)).view(4, 6, 33), (2, -4, 1, 1)), x)
    check(lambda x: torch.diagonal(F.pad(x, (0, 0, 1, 9)), dim1=1, dim2=2) * 2, x)


@pytest.mark.parametrize("size, stride", [((1,), (1,)), ((3, 4), (4, 1)), ((4, 3), (1, 4)), ((2, 0), (1, 1))])
def test_a_strided_copy_has_memory_of_its_own(size, stride):
    def f(x):
        y = x * 2
        return y, torch.as_strided_copy(y, size, stride)

    x = torch.randn(3, 4)
    y, copy = dynamotor.compile(f)(x)
    assert torch.equal(copy, f(x)[1]) and copy.stride() == f(x)[1].stride()
    copy.zero_()
    assert torch.equal(y, x * 2)
