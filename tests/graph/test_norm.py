"""Group norm of a half-precision input with float32 weights did not compile for training: a shape rule
expected float32.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dynamotor

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_have_the_types_of_eagers(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(2, 4, 3, 5).bfloat16().to(memory_format=memory_format),
        torch.randn(4),
        torch.randn(4),
    ]
    g = torch.randn(2, 4, 3, 5).bfloat16()
    found = []
    for f in (F.group_norm, dynamotor.compile(F.group_norm)):
        inputs = [t.detach().requires_grad_() for t in tensors]
        out = f(inputs[0], 2, *inputs[1:])
        found.append((out, *torch.autograd.grad(out, inputs, g)))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
