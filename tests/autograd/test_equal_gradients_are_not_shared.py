"""Two biases with one gradient got tensors over one memory, and the second backward added to it twice."""

from __future__ import annotations

import copy

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def test_gradients_accumulate_apart():
    cell = torch.nn.RNNCell(5, 7)
    reference = copy.deepcopy(cell)
    compiled = dynamotor.compile(cell)
    for _ in range(3):
        x, h = torch.randn(2, 5), torch.randn(2, 7)
        compiled(x, h).sum().backward()
        reference(x, h).sum().backward()
    for p, q in zip(cell.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
