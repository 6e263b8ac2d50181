"""Autograd hands on gradients whose memory differs from the values that they show: zeros of ops without a slope (kernels
read them at address 0), lazy conjugates and negatives.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

NAN = float("nan")


class Handed(torch.autograd.Function):
    """Gives the gradient that its second argument makes."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.make = make
        ctx.save_for_backward(y)
        return y.abs().sum()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.make(*ctx.saved_tensors), None


def _zeros(y: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(y.shape, dtype=y.dtype)


def _conjugate(y: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(y).mul(1 + 2j if y.is_complex() else 2).conj()


def _negative(y: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(torch.full_like(y, 3))


def _real(x: torch.Tensor) -> torch.Tensor:
    return x.exp() * x


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x * 2)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("make", [_zeros, _conjugate, _negative])
@pytest.mark.parametrize("f", [_real, _complex])
def test_a_gradient_is_what_it_shows(f: Callable, make: Callable, backend: str, dynamic: bool | None) -> None:
    found = []
    for run in (f, dynamotor.compile(f, backend=backend, dynamic=dynamic)):
        x = torch.arange(1.0, 5).requires_grad_()
        Handed.apply(run(x), make).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def _two(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.log() * y, y * 2


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("both", [False, True])
def test_zeros_without_memory_stay_zero_beside_nan(both: bool, backend: str) -> None:
    found = []
    for run in (_two, dynamotor.compile(_two, backend=backend)):
        x = torch.tensor([-1.0, 2.0, 0.0], requires_grad=True)
        y = torch.tensor([NAN, 1.0, NAN], requires_grad=True)
        a, b = run(x, y)
        (a.sgn().sum() + (b.sum() if both else 0)).backward()
        found.append((x.grad, y.grad))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("make", [_zeros, _conjugate, _negative])
def test_an_argument_is_what_it_shows(make: Callable) -> None:
    for given in (torch.randn(3), torch.randn(3, dtype=torch.complex64)):
        compiled = dynamotor.compile(lambda x: x * 2 + 1)
        x = make(given)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), x * 2 + 1)
            torch.testing.assert_close(compiled(given), given * 2 + 1)


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_a_sparse_gradient_is_made_dense(backend: str) -> None:
    found = []
    for run in (torch.exp, dynamotor.compile(torch.exp, backend=backend)):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        torch.nn.functional.embedding(torch.tensor([1, 1, 4]), run(x), sparse=True).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1].to_dense(), found[0].to_dense())
