"""Losses of two tensors, and their gradients."""

import pytest
import torch
import torch.nn.functional as F
from harness import check

import dynamotor

LOSSES = {
    "mse": lambda x, y, how: F.mse_loss(x, y, reduction=how),
    "smooth_l1": lambda x, y, how: F.smooth_l1_loss(x, y, reduction=how, beta=0.7),
    "smooth_l1 of 0": lambda x, y, how: F.smooth_l1_loss(x, y, reduction=how, beta=0.0),
    "huber": lambda x, y, how: F.huber_loss(x, y, reduction=how, delta=0.7),
    "logits": lambda x, y, how: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=how),
    "logits, weighed": lambda x, y, how: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), y[0].detach().abs(), reduction=how, pos_weight=y[1].detach().abs()
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_as_in_eager(loss: str, how: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(5, 7).to(dtype) for _ in range(2))
    check(lambda x, y: LOSSES[loss](x, y, how), x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_eager(loss: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compiled = dynamotor.compile(LOSSES[loss])
    for how in ("mean", "sum", "none"):
        x, y = (torch.randn(5, 7, dtype=dtype, requires_grad=True) for _ in range(2))
        found, expected = (
            torch.autograd.grad((run(x, y, how) * torch.linspace(1, 2, 7, dtype=dtype)).sum(), (x, y))
            for run in (compiled, LOSSES[loss])
        )
        torch.testing.assert_close(found, expected)
