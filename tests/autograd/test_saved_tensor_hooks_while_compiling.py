"""Saved-tensor hooks of the user are not called while compiling: checkpointing counted it and
raised an error.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dynamotor

pytestmark = pytest.mark.regression


def test_the_first_call_may_be_checkpointed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU()).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    wanted, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(wanted).square().sum().backward()
    checkpoint(dynamotor.compile(model), found, use_reentrant=False).square().sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad)


def test_hooks_see_tensors_with_data_and_stay_in_place() -> None:
    seen: list[type] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(type(tensor))
        return tensor

    compiled = dynamotor.compile(lambda x: (x.sin() * x).exp())
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compiled(x).sum().backward()
        number = len(seen)
        x.sin()
    assert number > 0 and len(seen) > number
    assert set(seen) <= {torch.Tensor, torch.nn.Parameter}
