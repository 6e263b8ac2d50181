"""Fusing the backward of instance norm split a loop and then looked for the variable that it had replaced."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dynamotor

pytestmark = pytest.mark.regression


def test_instance_norm_with_statistics_trains():
    tensors = [torch.randn(2, 3, 4), torch.randn(3), torch.randn(3)]
    results = []
    for f in (F.instance_norm, dynamotor.compile(F.instance_norm)):
        x, w, b = (t.clone().requires_grad_() for t in tensors)
        mean, var = torch.zeros(3), torch.ones(3)
        out = f(x, mean, var, w, b, momentum=0.5)
        out.pow(2).sum().backward()
        results.append((out, x.grad, w.grad, b.grad, mean, var))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
