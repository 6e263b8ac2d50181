"""Half-precision comparisons saw float32 on one side and what memory holds on the other: amax had gradients
of 0 or NaN.
"""

from __future__ import annotations

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_a_maximum_of_a_product_finds_its_element_again(dtype: torch.dtype, dims: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(17, 49).to(dtype), torch.randn(49).to(dtype)]

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * w).amax(dims), (x * w).amin(dims)

    found = []
    for g in (f, dynamotor.compile(f)):
        x, w = (t.clone().requires_grad_() for t in tensors)
        sum(t.float().sum() for t in g(x, w)).backward()
        found.append((x.grad, w.grad))
    (x, w), (got_x, got_w) = found
    assert torch.equal(got_x, x)
    torch.testing.assert_close(got_w, w, rtol=2e-2, atol=2e-2)


def test_a_number_is_rounded_as_the_tensor_is():
    x = torch.tensor([0.1, 0.2, 1 / 3, 0.30078125], dtype=torch.bfloat16)
    tests = (lambda x: x == 0.1, lambda x: x != 0.1, lambda x: x <= 0.3, lambda x: x > torch.tensor(0.3))
    for test in tests:
        assert torch.equal(dynamotor.compile(test)(x), test(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_number_divides_halves_as_it_is(dtype: torch.dtype) -> None:
    number = 1.0934867858886719
    x = (torch.arange(-200, 200) * torch.tensor(number)).to(dtype)
    for divisor in (number, torch.tensor(number), torch.tensor(number).to(dtype), torch.tensor([number])):
        for mode in ("floor", "trunc"):
            want = x.div(divisor, rounding_mode=mode)
            assert torch.equal(dynamotor.compile(torch.div)(x, divisor, rounding_mode=mode), want)
        assert torch.equal(dynamotor.compile(lambda x, d: x // d)(x, divisor), x // divisor)


OTHERS = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.slow  # many kernels
def test_a_tensor_without_dimensions_is_read_as_eager_reads_it(dtype: torch.dtype) -> None:
    """It keeps its digits as a divisor and as the second factor; everywhere else it is rounded to the common type."""
    others = [
        torch.tensor(n, dtype=of)
        for n in (1.0009765625, 0.333251953125, 1.99, 3.1, 70000.3, 1e-8)
        for of in (OTHERS[dtype], torch.float64)
    ]

    def program(x: torch.Tensor, others: list[torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for y in others:
            found += [x.div(y, rounding_mode="floor"), x.div(y, rounding_mode="trunc"), x // y, x * y, x / y]
            found += [y * x, y / x, torch.atan2(x, y), torch.logical_xor(x, y), torch.addcmul(x, x, y)]
        return found

    x = torch.cat([torch.arange(-8.0, 9), *(torch.arange(1, 9) * y.double() for y in others[:8])]).to(dtype)
    for got, want in zip(dynamotor.compile(program)(x, others), program(x, others), strict=True):
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", OTHERS)
def test_a_quotient_of_halves_is_rounded_before_it_is_truncated(dtype: torch.dtype) -> None:
    x, y = (torch.linspace(-90, 80, 400).to(dtype), torch.linspace(0.3, 4, 400).to(dtype))
    quotients = lambda x, y: (x.div(y, rounding_mode="trunc"), x.div(y[:1] + 1, rounding_mode="trunc"))  # noqa: E731
    for got, want in zip(dynamotor.compile(quotients)(x, y), quotients(x, y), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_exponent_is_rounded_as_the_halves_that_it_raises(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, -0.99, -1.0, -2.0, 1.0, 0.99, torch.inf, -torch.inf, torch.nan]).to(dtype)
    for exponent in (
        2049,
        100.1,
        2.001,
        0.5,
        -0.5,
        torch.tensor(100.1),
        torch.tensor(2049.0, dtype=torch.float64),
    ):
        want = x**exponent
        torch.testing.assert_close(dynamotor.compile(lambda x, e: x**e)(x, exponent), want, equal_nan=True)
        torch.testing.assert_close(dynamotor.compile(lambda x, e=exponent: x**e)(x), want, equal_nan=True)


def test_a_power_is_of_its_own_type_wherever_it_is_read() -> None:
    x, y = torch.rand(1, 2), torch.rand(1, 2)
    for f in (lambda x, y: (x**0.3).cumprod(0, dtype=torch.int8), lambda x, y: (x**y).max(-2)[1]):
        assert torch.equal(dynamotor.compile(f)(x, y), f(x, y))


@pytest.mark.parametrize("base", [0.3, 65520.0, -1e9])
def test_a_number_that_is_raised_to_halves_is_rounded_as_they_are(base: float) -> None:
    x = torch.tensor([1.0, -1.0, 2.5, -3.0, 7.0, 0.0], dtype=torch.float16)
    with dynamotor.config.patch(check=False):  # which says of -inf**-1 that it differs (docs/decisions.md)
        got = dynamotor.compile(lambda x: base**x)(x)
    torch.testing.assert_close(got, base**x, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_limit_of_hardshrink_is_rounded(dtype: torch.dtype) -> None:
    for limit in (1.7406373527932955, 0.4920810745732219, 0.5):
        x = torch.tensor([limit, -limit, limit * 1.01, limit * 0.99], dtype=dtype)

        def f(x: torch.Tensor, limit: float = limit) -> torch.Tensor:
            return torch.nn.functional.hardshrink(x, limit)

        assert torch.equal(dynamotor.compile(f)(x), f(x))
