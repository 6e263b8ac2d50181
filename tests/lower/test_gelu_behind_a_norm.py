"""The backward of a layer norm reads gelu's gradient, whose expression is made while the norm is lowered."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamotor

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_linear_norm_gelu_trains_as_in_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    ).to(dtype)
    x = torch.randn(5, 64, dtype=dtype)
    wanted = torch.autograd.grad(model(x).sum(), model.parameters())
    found = torch.autograd.grad(dynamotor.compile(model)(x).sum(), model.parameters())
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).double().norm() <= tolerance * max(b.double().norm().item(), 1.0)
