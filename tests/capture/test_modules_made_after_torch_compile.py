"""Once torch.compile has run in a process, it wraps `Module.__init__`; a module that a program makes is still
made in its graph.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.mutation_guard import install_generation_tagging_init

import dynamotor

pytestmark = pytest.mark.regression


def test_a_module_made_in_the_call_breaks_nothing(monkeypatch):
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(torch.nn.Module, name, getattr(torch.nn.Module, name))
    monkeypatch.setattr(torch.nn.Module, "___needs_generation_tag_patch", True, raising=False)
    install_generation_tagging_init()
    assert "patched_init" in torch.nn.Module.__init__.__qualname__

    def loss(x, y):
        return torch.nn.CrossEntropyLoss()(x, y)

    x, y = torch.randn(3, 4), torch.tensor([0, 1, 3])
    compiled = dynamotor.compile(loss, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, y), loss(x, y))
