"""A `torch.Size` among the arguments, as of a function that goes on behind a graph break: the sizes that differ
between calls are symbols.
"""

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters


def reshaped(x, shape):
    return x.view(*shape, -1) + shape[0], shape


def asked(x, shape):
    rows, columns = shape
    kinds = type(shape) is torch.Size, isinstance(shape, tuple), len(shape), shape == (rows, columns)
    return x * shape.numel() + rows, kinds, shape[-1:], shape + (3,), tuple(shape), [*reversed(shape)]


def made(x, shape):
    return torch.zeros(shape) + x.sum(), torch.ones(shape[1:]), x.reshape(shape).expand(2, *shape)


@pytest.mark.parametrize("function", [reshaped, asked, made])
def test_a_shape_that_differs_is_captured_twice(function):
    compiled, before = dynamotor.compile(function), counters["frames"]["captured"]
    for rows, columns in ((3, 8), (5, 8), (7, 8), (11, 8), (6, 8)):
        x = torch.randn(rows * columns)
        got, want = (f(x, torch.Size((rows, columns))) for f in (compiled, function))
        torch.testing.assert_close(got, want)
        assert str(got[1:]) == str(want[1:])
    assert counters["frames"]["captured"] - before == 2


def test_another_kind_or_length_is_captured_anew():
    compiled = dynamotor.compile(lambda x, shape: (x.view(shape), type(shape), len(shape)))
    for shape in (
        torch.Size((2, 6)),
        torch.Size((3, 4)),
        (3, 4),
        [4, 3],
        torch.Size((2, 2, 3)),
        torch.Size((12,)),
    ):
        got = compiled(torch.arange(12), shape)
        assert got[0].shape == torch.Size(shape) and got[1:] == (type(shape), len(shape))


def test_the_shape_itself_is_returned():
    compiled = dynamotor.compile(lambda x, shape: (x + shape[0], shape, [shape]))
    for rows in (3, 5, 7):
        shape = torch.Size((rows, 2))
        _, same, (again,) = compiled(torch.zeros(2), shape)
        assert same is shape and again is shape


def test_a_shape_handed_on_behind_a_break():
    def model(x):
        shape = x.shape[:-1]
        y = x.relu()
        torch._dynamo.graph_break()
        return y.reshape(*shape, -1, 2).sum(-1), shape

    compiled, before = dynamotor.compile(model), counters["frames"]["captured"]
    for rows in (3, 5, 7, 11, 13):
        x = torch.randn(rows, 8)
        got, want = compiled(x), model(x)
        torch.testing.assert_close(got[0], want[0])
        assert got[1] == want[1] and type(got[1]) is torch.Size
    assert counters["frames"]["captured"] - before == 4
