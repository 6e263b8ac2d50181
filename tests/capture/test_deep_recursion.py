"""Recursion within Python's limit runs, however deep."""

from __future__ import annotations

import contextlib

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters
from dynamotor.capture import frontend


def down(x: torch.Tensor, n: int) -> torch.Tensor:
    return x if n == 0 else down(x + 1, n - 1)


@pytest.mark.parametrize("depth", [50, 230, 700])
def test_a_deep_recursion_gives_what_eager_gives(depth: int) -> None:
    compiled = dynamotor.compile(down, backend="eager")
    assert torch.equal(compiled(torch.ones(3), depth), down(torch.ones(3), depth))


def test_capture_beyond_pythons_limit_is_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    # without its room: capture takes several of Python's calls for one of the program's
    monkeypatch.setattr(frontend, "deep_recursion", contextlib.nullcontext)
    compiled = dynamotor.compile(down, backend="eager")
    counters.clear()
    assert torch.equal(compiled(torch.ones(3), 200), down(torch.ones(3), 200))
    assert set(counters["breaks"]) == {"DM223"}
    assert torch.equal(compiled(torch.ones(3), 3), down(torch.ones(3), 3))
