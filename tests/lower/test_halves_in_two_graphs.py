"""A forward that goes on with more digits than it saved: its backward found no element that equals the
maximum, and gave NaN.
"""

from __future__ import annotations

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_maximum_of_what_is_saved(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        saved = y - x
        return saved, (saved + x).amax(0, keepdim=True)

    for seed in range(8):
        torch.manual_seed(seed)
        x, y = torch.randn(3, 5).to(dtype).requires_grad_(), torch.randn(3, 5).to(dtype)
        saved, top = dynamotor.compile(f)(x, y)
        assert torch.equal(top, (saved + x).amax(0, keepdim=True))
        assert torch.equal(torch.autograd.grad(top.sum(), x)[0], torch.autograd.grad(f(x, y)[1].sum(), x)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_minimum_is_found_again_by_the_backward(dtype: torch.dtype) -> None:
    """The backward calculated the sums anew, without the rounding of the one that the forward stores: nothing
    equalled the minimum.
    """

    def f(x, y, z):
        first = x + y
        second = first + z
        return second.amin(-2), second, first

    torch.manual_seed(0)
    x, y = torch.randn(1, 16, 16).to(dtype), torch.randint(-9, 10, (16, 16, 16)).permute(2, 1, 0)
    z = torch.randn(16, 1, 16).to(dtype).requires_grad_()
    found = dynamotor.compile(f)(x, y, z)[0]
    (gradient,) = torch.autograd.grad(found, z, torch.ones_like(found))
    assert gradient.eq(1).all()
