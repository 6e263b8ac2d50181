"""Whole steps whose graphs take tensors of wrapper subclasses: frozen quantised weights, jagged batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nested import nested_tensor_from_jagged as from_jagged
from wrapper_classes import Quantised, Unwrapped

import dynamotor

F = nn.functional


class Adapted(nn.Module):
    """A frozen quantised weight with a trained difference of low rank."""

    def __init__(self):
        super().__init__()
        values = torch.randint(-9, 9, (6, 6), dtype=torch.int8)
        self.weight = nn.Parameter(Quantised(values, torch.tensor(0.1)), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.zeros(2, 6))

    def forward(self, x):
        return F.linear(x, self.weight) + x @ self.down @ self.up


class Ragged(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return (self.linear(x).relu() + x).to_padded_tensor(0.0).sum((1, 2))


class Held(Unwrapped):
    """A wrapper that in-place ops write, and whose other ops give plain tensors."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        result = func(*(a.held if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].held)
        return args[0] if func._schema.is_mutable else result


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Held(torch.randn(6, 6)))

    def forward(self, x):
        return x @ self.weight


def plain():
    return torch.randn(4, 6), torch.randn(4, 6)


def ragged():
    lengths = torch.tensor([2, 3, 1])
    x = from_jagged(torch.randn(6, 6), torch.tensor([0, *lengths.cumsum(0)]))
    return x, torch.randn(3)


def losses(kind, batch, train):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step = train(model, F.mse_loss, optimizer)
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        found.append(step(*batch()).detach())
    return torch.stack(found), step


def eager(model, loss_fn, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize(("kind", "batch"), [(Adapted, plain), (Ragged, ragged)])
def test_a_step_over_wrappers_is_one_program(kind, batch):
    want, _ = losses(kind, batch, eager)
    got, step = losses(kind, batch, dynamotor.compile_step)
    torch.testing.assert_close(want, got)
    assert "1 whole step(s) as one program" in step.explain() and "in pieces" not in step.explain()


@pytest.mark.filterwarnings("ignore::dynamotor.EagerWarning")
def test_a_wrapper_that_is_trained_runs_in_pieces():
    want, _ = losses(Trained, plain, eager)
    got, step = losses(Trained, plain, dynamotor.compile_step)
    torch.testing.assert_close(want, got)
    assert "in pieces [DM502]: a tensor subclass is trained" in step.explain()
