"""Memory that a library call writes: slices, holes, strided parts and copies."""

import pytest
import torch
import torch.nn.functional as F

import dynamotor


def _scattered_twice(x):
    return torch.slice_scatter(x, x[1:] * 2, 0, 1), torch.slice_scatter(x, x[1:] * 2, 0, 1)


def _scattered_after_a_write(x):
    x[[0, -1]] = 1
    return torch.slice_scatter(x, x[1:] * 2, 0, 1)


def _scattered_then_written(x):
    return torch.slice_scatter(x, x[1:] * 2, 0, 1).mul_(2)


def _scattered_between(x):
    x = x.unsqueeze(0).as_strided((1, 2, 1, 5), (75, 3, 25, 5))
    return torch.slice_scatter(x, x[1:] * 1, 0, 1)


@pytest.mark.regression
@pytest.mark.parametrize("function", [_scattered_twice, _scattered_after_a_write, _scattered_then_written])
@pytest.mark.parametrize("columns", [2, 3])
def test_what_is_scattered_into_a_slice_has_its_holes(function, columns):
    first = torch.randn(2, columns)
    second = first.clone()
    want, got = function(first[..., ::2]), dynamotor.compile(function)(second[..., ::2])
    for a, b in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (want, got)), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def _selected_between(x):
    x = x[:12].view(2, 2, 3)[..., ::2]
    return torch.select_scatter(x, x.select(-1, 0) + 1, -1, -1)


@pytest.mark.regression
@pytest.mark.parametrize("function", [_scattered_between, _selected_between])
def test_slices_that_interleave_in_memory(function):
    x = torch.randn(80)
    compiled = dynamotor.compile(function)
    with dynamotor.config.patch(verify=True):
        assert torch.equal(compiled(x), function(x))
    assert "DM913" not in str(dynamotor.explain(function)(x).eager)


def _strided_part_of_a_join(x):
    x = x.reshape(1, 1) * 2
    return torch.cat([x, torch.as_strided_copy(x, (1, 1), (1, 1)), x], 1)


@pytest.mark.regression
def test_what_was_written_whole_lies_elsewhere_than_the_memory():
    x, weight = torch.randn((), requires_grad=True), torch.randn(1, 3)
    want, got = (
        torch.autograd.grad(f(x), x, weight)
        for f in (_strided_part_of_a_join, dynamotor.compile(_strided_part_of_a_join))
    )
    torch.testing.assert_close(got, want)


def _strided_after_a_write(x):
    x.view(6, 3)[..., -1].add_(1)
    return x.as_strided(x.shape, x.stride()) * 2


@pytest.mark.regression
def test_memory_with_holes_that_was_written_is_addressed_by_eager():
    first, second = torch.randn(2, 3, 6)[..., ::2], torch.randn(2, 3, 6)[..., ::2]
    second.copy_(first)
    torch.testing.assert_close(
        dynamotor.compile(_strided_after_a_write)(second), _strided_after_a_write(first)
    )
    torch.testing.assert_close(second, first)


@pytest.mark.regression
@pytest.mark.parametrize("stride", [1, 2])
def test_an_input_of_a_convolution_that_is_written_afterwards(stride: int) -> None:
    """The write went into the channels-last copy that the convolution had been given."""

    def f(x, weight, factor):
        y = torch.nn.functional.conv2d(x, weight, stride=stride)
        x.mul_(factor)
        return y, x + 1

    found = []
    for run in (f, dynamotor.compile(f, fullgraph=True)):
        x = torch.arange(128.0).view(2, 4, 4, 4)
        found.append((run(x, torch.ones(4, 4, 1, 1), torch.tensor(3.0)), x))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.regression
@pytest.mark.parametrize("backend", ["native", "aot_eager"])
def test_copies_that_address_memory_outside_of_a_view(backend: str) -> None:
    """73001:17803: behind a write into an input, a copy by addresses saw the view's elements alone."""

    def nothing_of_it(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.ge_(y)
        return torch.as_strided_copy(F.layer_norm(x, (1,))[-4:-6:2, :], (1,), (1,))

    def before_it(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.ge_(y)
        return torch.as_strided_copy((x + 3)[1:], (2,), (1,), 0)

    for f, n in ((nothing_of_it, 1), (before_it, 1), (before_it, 3)):
        x = torch.randn(n + 1 if f is before_it else n, 1)
        y = torch.randn(())
        assert torch.equal(dynamotor.compile(f, backend=backend)(x.clone(), y), f(x.clone(), y))
