"""A forward that goes on with more digits than it saved: its backward found no element that equals the maximum, and gave NaN."""

from __future__ import annotations

import pytest
import torch

import dynamotor


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
