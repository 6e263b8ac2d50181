"""A buffer that a call gives several values in turn holds the last one, which is not in the graph's inputs."""

from __future__ import annotations

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def test_a_buffer_that_is_set_twice() -> None:
    class Net(torch.nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = x.detach() + self.mean
            self.mean = self.mean * 2
            return x - self.mean

    ours, theirs, x = Net(), Net(), torch.randn(2)
    call = dynamotor.compile(ours, fullgraph=True, backend="eager")
    for _ in range(3):
        assert torch.equal(call(x), theirs(x))
        assert torch.equal(ours.mean, theirs.mean)
