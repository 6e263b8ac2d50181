"""Batch norm in evaluation mode was left to aten on a CPU where no convolution was before it, and wherever a model trained around it."""

from __future__ import annotations

import copy

import torch
from torch import nn

import dynamotor


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
