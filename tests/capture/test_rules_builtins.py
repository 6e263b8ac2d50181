"""`locals()` and its dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor


def f_locals(x: torch.Tensor) -> Any:
    exec("z = 3")
    return x + locals().get("z", 0), sorted(locals())


def f_held_locals(x: torch.Tensor) -> Any:
    held = locals()
    held["q"] = 5
    y = x + 1
    print(end="")
    return y, locals().get("q")


def f_inlined(x: torch.Tensor) -> Any:
    return f_held_locals(x * 2), f_locals(x - 1)


@pytest.mark.regression
@pytest.mark.parametrize("function", [f_locals, f_held_locals, f_inlined])
def test_dicts_of_locals(function: Callable[..., Any]) -> None:
    compiled = dynamotor.compile(function, backend="eager")
    for _ in range(2):
        assert str(compiled(torch.ones(2))) == str(function(torch.ones(2)))
