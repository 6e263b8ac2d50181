"""An autograd function that writes into its input behind autograd's back and returns it, as solvers of ODEs
do.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamotor

pytestmark = pytest.mark.regression


class Assign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scratch, value, index):
        ctx.index = index
        scratch.data[index] = value
        return scratch

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[ctx.index], None


class Solver(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Linear(4, 4)

    def forward(self, y):
        k = torch.empty(*y.shape, 4)
        k = Assign.apply(k, self.rate(y).tanh(), (..., 0))
        for i in range(1, 4):
            step = y + torch.sum(k[..., :i] * 0.1, dim=-1)
            k = Assign.apply(k, self.rate(step).tanh(), (..., i))
        return y + k.sum(-1), k


@pytest.mark.slow
def test_training_through_it():
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        solver = Solver()
        run = dynamotor.compile(solver) if compiled else solver
        y = torch.randn(3, 4)
        for _ in range(2):
            end, k = run(y)
            (end.square().sum() + k[..., -1].sum()).backward()
        results.append([end.detach(), k.detach(), *[p.grad for p in solver.parameters()]])
    torch.testing.assert_close(results[1], results[0])
