"""Gradients that formulas give as zeros: a NaN slope has the effect that it has in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

X = torch.tensor([float("nan"), 1.0, -2.0, 0.0])


def _gradient(f: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    f(leaf).backward(torch.ones(4))
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.log().sgn(),  # a zero without memory: NaN times it is zero
        lambda x: (1 / x).sgn() * 2,  # ... but minus it has memory
        lambda x: (x * x).log().sgn() + x,
        lambda x: x.sqrt().round(),  # zeros as any others
    ],
)
def test_the_gradient_of_a_step_behind_a_slope_of_nan(function: Callable[..., torch.Tensor]) -> None:
    found = _gradient(dynamotor.compile(function), X)
    torch.testing.assert_close(found, _gradient(function, X), rtol=0, atol=0, equal_nan=True)


def test_zeros_are_kept_where_the_other_gradient_of_a_sum_is_absent() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean(0, dtype=torch.float64), torch.copysign(y, x.lgamma())

    def gradient(g: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
        x, y = torch.zeros((), requires_grad=True), torch.zeros(1, requires_grad=True)
        g(x, y)[1].backward(torch.ones(1))
        return x.grad

    found, wanted = gradient(dynamotor.compile(f)), gradient(f)
    assert found is not None and wanted is not None and found.isnan() and wanted.isnan()


@pytest.mark.parametrize("name", ["copysign", "nextafter", "angle", "sgn"])
@pytest.mark.parametrize("shape", [(4,), (2, 4), (1, 4)])
@pytest.mark.parametrize("other", [(), (4,), (2, 4)])
def test_zeros_that_depend_on_no_gradient_arrive_where_eagers_do(
    name: str, shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """The first result gets no gradient, so that all that arrives behind it is made of those zeros."""

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.softmax(x, -1).abs()  # which gives a NaN the sign that eager's has
        operands = (hidden,) if name in ("angle", "sgn") else (y, hidden)
        return hidden, getattr(torch, name)(*operands)

    def gradient(g: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
        leaf = X.expand(shape).clone().requires_grad_()
        return torch.autograd.grad(g(leaf, torch.ones(other))[1].sum(), leaf, allow_unused=True)[0]

    try:
        wanted = gradient(f)
    except NotImplementedError as error:  # nextafter before PyTorch 2.13
        pytest.skip(str(error))
    found = gradient(dynamotor.compile(f))
    assert found is not None and wanted is not None
    assert torch.equal(found.isnan(), wanted.isnan())


@pytest.mark.parametrize("name", ["ge_", "eq_", "less_"])
@pytest.mark.parametrize("result", [0, 1])
@pytest.mark.parametrize("swapped", [False, True])
def test_zeros_of_a_comparison_in_place_are_there_where_its_gradient_is(
    name: str, result: int, swapped: bool
) -> None:
    """A variance of one number makes a NaN of the zeros that flow into it."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        variance, mean = torch.var_mean(x, 0)
        operands = (mean.clone(), variance) if swapped else (variance, mean)
        return mean * 2, getattr(operands[0], name)(operands[1])

    def gradient(g: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        leaf = torch.ones(1, requires_grad=True)
        return torch.autograd.grad(g(leaf)[result], leaf)[0]

    with dynamotor.config.patch(strict=True):
        torch.testing.assert_close(gradient(dynamotor.compile(f)), gradient(f), equal_nan=True)
