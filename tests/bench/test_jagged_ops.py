"""The bench of ops on jagged tensors tells right samples from wrong ones."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import dynamotor
from bench import jagged_ops


def sample():
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    return SimpleNamespace(input=x.detach().requires_grad_(), args=(), kwargs={})


def test_a_right_sample_is_told_from_a_wrong_one(monkeypatch):
    assert jagged_ops.judge(torch.sin, sample()) == ("right", "")
    monkeypatch.setattr(dynamotor, "compile", lambda fn: lambda x: fn(x) + 1e-3)
    assert jagged_ops.judge(torch.sin, sample())[0] == "wrong"
    monkeypatch.setattr(dynamotor, "compile", lambda fn: lambda x: fn(x).values())
    assert jagged_ops.judge(torch.sin, sample())[0] == "wrong"


def test_a_sample_that_eager_refuses_is_left_out():
    assert jagged_ops.judge(lambda x: x.size(1) + 1, sample()) == ("eager raises", "")
