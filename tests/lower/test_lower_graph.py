"""Odd sizes, types and layouts of single operations give eager's results."""

import pytest
import torch
import torch.nn.functional as F

import dynamotor


@pytest.mark.regression
def test_padding_of_nothing() -> None:
    x = torch.zeros(0, 3)
    assert torch.equal(
        dynamotor.compile(lambda x: F.pad(x, (1, 1, 2, 0), value=2.0))(x), torch.full((2, 5), 2.0)
    )


@pytest.mark.regression
def test_a_sum_of_booleans_with_a_factor_of_false() -> None:
    x, y = torch.tensor([True, False]), torch.tensor([True, True])
    assert torch.equal(dynamotor.compile(lambda x, y: torch.add(x, y, alpha=False))(x, y), x)


@pytest.mark.regression
def test_an_expanded_base_of_a_complex_power_trains() -> None:
    def gradients(f):
        x = torch.full((1, 3), 1 + 1j).expand(4, 3).requires_grad_()
        return torch.autograd.grad(f(x, torch.full((3,), 2 - 1j)).abs().sum(), x)[0]

    torch.testing.assert_close(gradients(dynamotor.compile(torch.pow)), gradients(torch.pow))


@pytest.mark.regression
def test_strides_of_ldexp_and_of_found_positions() -> None:
    x, places = torch.ones(10, 1, 5, dtype=torch.float16), torch.ones(5, 10, dtype=torch.float16).t()
    for f in (lambda: torch.ldexp(x, places), lambda: torch.nonzero_static(x, size=4)):
        assert dynamotor.compile(f)().stride() == f().stride()


@pytest.mark.regression
def test_hardsigmoids_gradient_is_the_librarys_in_float64() -> None:
    x = torch.rand(9, dtype=torch.float64, requires_grad=True)
    (want,), (got,) = (
        torch.autograd.grad(f(x).sum(), x) for f in (F.hardsigmoid, dynamotor.compile(F.hardsigmoid))
    )
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)


@pytest.mark.regression
def test_nothing_scattered_gives_a_copy() -> None:
    x = torch.ones(1)
    got = dynamotor.compile(lambda x: torch.slice_scatter(x, x[1:] * 1, 0, 1))(x)
    assert got is not x and got.data_ptr() != x.data_ptr()


@pytest.mark.regression
@pytest.mark.parametrize("loss", [F.smooth_l1_loss, F.soft_margin_loss])
def test_losses_of_two_types(loss) -> None:
    def gradient(f):
        x = torch.linspace(-1, 1, 4, dtype=torch.bfloat16, requires_grad=True)
        return torch.autograd.grad(f(x, torch.ones(4)).sum(), x)[0]

    torch.testing.assert_close(gradient(dynamotor.compile(loss)), gradient(loss))


@pytest.mark.regression
def test_pixels_of_nothing_stay_where_they_are() -> None:
    for shape in ((0, 2, 0), (0, 4, 4)):
        x = torch.zeros(shape)
        assert dynamotor.compile(lambda x: F.pixel_unshuffle(x, 2))(x).shape == F.pixel_unshuffle(x, 2).shape


@pytest.mark.regression
def test_numbers_of_another_type_wrap_to_the_tensors() -> None:
    x, number = torch.tensor([241, 3], dtype=torch.uint8), torch.tensor(1765)
    for f in (torch.gt, torch.maximum, torch.minimum, lambda x, n: x.clamp(min=n), lambda x, n: x + n > n):
        assert torch.equal(dynamotor.compile(f)(x, number), f(x, number))


@pytest.mark.regression
@pytest.mark.parametrize("stride", [(2, 0, 1), (8, 1, 2)])
def test_memory_with_strides_that_were_asked_for(stride) -> None:
    assert dynamotor.compile(lambda: torch.empty_strided((5, 5, 5), stride))().stride() == stride
    made = dynamotor.compile(lambda x: (x.new_empty_strided((5, 5, 5), stride), x + 1))(torch.ones(2))[0]
    assert made.stride() == stride


@pytest.mark.regression
@pytest.mark.parametrize("shift", [(1,), (2,), (1, 1), (2, 1), (1, 2)])
def test_a_roll_that_moves_nothing_is_row_major(shift) -> None:
    x = torch.randn(2, 2, 4, 2).contiguous(memory_format=torch.channels_last)[:, :, ::2]
    dims = (2, 3)[: len(shift)]
    got, want = dynamotor.compile(lambda x: x.roll(shift, dims))(x), x.roll(shift, dims)
    assert got.stride() == want.stride() and torch.equal(got, want)


@pytest.mark.regression
def test_a_roll_of_any_size_that_moves_nothing_is_row_major() -> None:
    def roll(x):
        return torch.roll(x, (1, 2), (3, 2))

    compiled = dynamotor.compile(roll, dynamic=True)
    for shape in ((2, 3, 4, 5), (2, 2, 2, 2), (3, 4, 5, 2)):
        x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
        assert compiled(x).stride() == roll(x).stride()
