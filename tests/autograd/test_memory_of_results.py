"""Results have memory of their own where eager's have, and views are other tensors."""

import pytest
import torch

import dynamotor

PROGRAMS = {
    "flip of a number": (lambda x: x.flip(0), torch.tensor(0.5)),
    "flip behind a running sum of a number": (lambda x: x.cumsum(0).flip(0), torch.tensor(0.5)),
    "roll that moves nothing": (lambda x: x.roll(1, 0), torch.tensor([0.5])),
    "select_scatter of a number into a bool": (
        lambda x: torch.select_scatter(x, x.select(-1, 0) + 1, -1, -1),
        torch.tensor([True]),
    ),
    "slice_scatter of numbers into bools": (
        lambda x: torch.slice_scatter(x, x[1:] * 2, 0, 1),
        torch.tensor([[False, True], [True, False]]),
    ),
    "stack of two types": (lambda x: torch.stack([x, x * 0.5], 1), torch.arange(4).reshape(1, 4, 1)),
}


@pytest.mark.regression
@pytest.mark.parametrize("name", PROGRAMS)
def test_result_is_eagers_in_memory_of_its_own(name):
    function, x = PROGRAMS[name]
    got = dynamotor.compile(function)(x)
    torch.testing.assert_close(got, function(x), rtol=0, atol=0)
    assert got.data_ptr() != x.data_ptr()


@pytest.mark.regression
@pytest.mark.parametrize("function", [lambda x: x[...], lambda x: x.movedim(0, 0), lambda x: (x * 2)[...]])
@pytest.mark.parametrize("grad", [False, True])
def test_a_view_of_all_of_an_input_is_another_tensor(function, grad):
    x = torch.tensor(0.5).requires_grad_(grad)
    got, want = dynamotor.compile(function)(x), function(x)
    assert got is not x
    assert (got.data_ptr() == x.data_ptr()) is (want.data_ptr() == x.data_ptr())


@pytest.mark.regression
def test_a_write_to_a_view_without_elements():
    def add(x):
        x[0].add_(1)
        return x

    torch.testing.assert_close(dynamotor.compile(add)(torch.ones(1, 0)), torch.ones(1, 0))


@pytest.mark.regression
def test_a_gradient_that_is_zero_everywhere_has_memory():
    x = torch.randn(64, dtype=torch.float64, requires_grad=True)
    dynamotor.compile(torch.sgn)(x).sum().backward()
    assert not x.grad.any()
