"""A graph that writes its inputs and raises is not run again: its error is eager's, at the user's line, and
says what is not done.
"""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

import dynamotor

SEEN: list[int] = []


def rows(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    SEEN.append(1)
    x.mul_(2)
    y = w * x.sum()
    return y[at] + 1  # rows


def targets(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.batch_norm(w, x, x + 1, training=True)
    x.add_(1)
    return torch.nn.functional.cross_entropy(logits, at)  # targets


def raised(function: Any, at: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x, w = torch.ones(3), torch.randn(2, 3)
    try:
        function(x, w, torch.tensor([0, at]))
    except Exception as error:
        [line] = [t.line for t in traceback.extract_tb(error.__traceback__) if t.name == function.__name__]
        chain = error.__context__, error.__suppress_context__
        return type(error), str(error), line, chain, getattr(error, "__notes__", [])
    return (None,)


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("function", [rows, targets])
def test_the_line_and_words_are_eagers(function: Any, backend: str) -> None:
    compiled = dynamotor.compile(function, backend=backend)
    assert raised(compiled, 1) == raised(function, 1)
    for _ in range(2):
        *found, notes = raised(compiled, 7)
        *expected, _ = raised(function, 7)
        assert found == expected
        assert ["DM405" in note for note in notes] == [True] * (function is rows)
