"""A tensor that is regrouped where no dimensions nest, then read backwards (as the gradient of a running sum
is): positions were divided while they were negative, and C++ rounds those towards zero.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression
VECTORS = {"isa": "avx2"} if platform.machine() == "x86_64" else {}


def grouped_logsumexp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y).cumsum(-2).view(16, 2, 2, 3).logsumexp(3)


def flipped_scan(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.view(64, 3) * y.view(64, 3)[:, :1]).view(3, 64).flip(0).cumsum(0)


def flipped_maximum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.view(16, 12) - y.view(16, 12).softmax(0)).view(6, 32).flip(0, 1).cummax(0)[0].view(64, 3).sum(1)


@pytest.mark.parametrize("settings", [VECTORS, {"isa": "portable"}, {"target": "triton"}], ids=str)
@pytest.mark.parametrize("f", [grouped_logsumexp, flipped_scan, flipped_maximum])
def test_gradients(f: Callable[..., torch.Tensor], settings: dict[str, str]) -> None:
    x, y = torch.randn(3, 64, requires_grad=True), torch.randn(3, 64, requires_grad=True)
    want = f(x, y)
    given = torch.randn_like(want)
    with dynamotor.config.patch(strict=True, **settings):
        got = dynamotor.compile(f)(x, y)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for a, b in zip(
            torch.autograd.grad(got, (x, y), given), torch.autograd.grad(want, (x, y), given), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [64, 40])
def test_sizes_that_are_symbols(columns: int) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).view(x.shape[1], x.shape[0]).flip(0).cumsum(0).view(x.shape).flip(1).cumsum(0)

    def g(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).view(-1, 3).flip(0).cumsum(0).view(-1, 2).flip(1).logcumsumexp(0)

    for fn in (f, g):
        call = dynamotor.compile(fn, dynamic=True)
        for rows in (6, 9, 12, 30):
            x, y = torch.randn(rows, columns), torch.randn(rows, 1)
            torch.testing.assert_close(call(x, y), fn(x, y), rtol=1e-4, atol=1e-4)
