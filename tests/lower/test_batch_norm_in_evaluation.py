"""Batch norm in evaluation mode was left to aten on a CPU where no convolution was before it, and wherever a
model trained around it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dynamotor

pytestmark = pytest.mark.regression


class Frozen(nn.Module):
    """A convolution whose batch norm does not train, and one without a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        for norm in (self.norm, self.other):
            nn.init.normal_(norm.running_mean), nn.init.uniform_(norm.running_var, 0.5, 2.0)
            norm.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.relu(self.norm(self.conv(x)))).tanh()


def test_inference() -> None:
    model, x = Frozen().eval().double(), torch.randn(4, 3, 6, 5, dtype=torch.float64)
    dynamotor.counters.clear()
    with torch.no_grad():
        torch.testing.assert_close(dynamotor.compile(model)(x), model(x))
    assert not dynamotor.counters["fallback"]


def test_training_around_it() -> None:
    model, x = Frozen().double(), torch.randn(4, 3, 6, 5, dtype=torch.float64)
    twin = copy.deepcopy(model)
    dynamotor.counters.clear()
    dynamotor.compile(twin)(x).square().sum().backward()
    model(x).square().sum().backward()
    for want, got in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    for want, got in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(got, want)
    assert not dynamotor.counters["fallback"]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
def test_its_statistics_are_empty_on_a_cpu(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """They were taken for one number a channel, and what read them read beyond their memory."""

    def statistics(x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, mean, rstd = torch.native_batch_norm(x, p, p, p, p, False, 0.1, 1e-5)
        return y, mean, rstd, mean + 1, rstd.sum()

    x, p = torch.randn(3, 4, 5).to(dtypes[0]), torch.rand(4).to(dtypes[1])
    wanted, found = statistics(x, p), dynamotor.compile(statistics)(x, p)
    tolerance = 2e-2 if dtypes[0] is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
