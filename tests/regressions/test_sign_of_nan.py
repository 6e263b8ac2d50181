"""Eager's sign has two comparisons: no number has the sign 0, and so has minus zero."""

from __future__ import annotations

import pytest
import torch

import dynamotor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sign_and_the_gradient_of_abs_at_nan_and_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([float("nan"), -0.0, 0.0, 1.0, -2.0, float("inf")], dtype=dtype)
    found, wanted = dynamotor.compile(torch.sign)(x), torch.sign(x)
    assert torch.equal(found, wanted) and torch.equal(torch.signbit(found), torch.signbit(wanted))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    dynamotor.compile(torch.abs)(a).sum().backward()
    b.abs().sum().backward()
    assert torch.equal(a.grad, b.grad)
