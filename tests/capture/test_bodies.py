"""A function whose body goes into the graph (a hook, a function given to `vmap`) is interpreted once, when it is put
there: its effects on objects must break the graph, also where the trace has touched or made them before
(96002:21755, 27151: hooks that wrote into a log ran at once).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dynamotor

pytestmark = pytest.mark.regression

LOG: list[Any] = []


class Box:
    def __init__(self) -> None:
        self.count = 0


def _a_list_touched_before(x: torch.Tensor) -> Any:
    LOG.append("before")
    y = x * 2
    y.register_hook(lambda grad: LOG.append("hook"))
    return y, None


def _a_list_of_the_trace(x: torch.Tensor) -> Any:
    seen: list[str] = []
    y = x * 2
    y.register_hook(lambda grad: seen.append("hook"))
    return y, seen


def _a_dict_of_the_trace(x: torch.Tensor) -> Any:
    seen = {"hooks": 0}
    y = x * 2
    y.register_hook(lambda grad: seen.update(hooks=1))
    return y, seen


def _a_variable(x: torch.Tensor) -> Any:
    count, y = 0, x * 2

    def hook(grad: torch.Tensor) -> None:
        nonlocal count
        count += 1

    y.register_hook(hook)
    return y, lambda: count


def _an_object_of_the_trace(x: torch.Tensor) -> Any:
    box, y = Box(), x * 2
    y.register_hook(lambda grad: setattr(box, "count", box.count + 1))
    return y, box


def _a_checkpoint(x: torch.Tensor) -> Any:
    seen: list[str] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append("body")
        return x.sin() * x

    return checkpoint(body, x, use_reentrant=False), seen


def _shown(value: Any) -> Any:
    value = value() if callable(value) else vars(value) if isinstance(value, Box) else value
    return repr((value, LOG))


CASES = [
    _a_list_touched_before,
    _a_list_of_the_trace,
    _a_dict_of_the_trace,
    _a_variable,
    _an_object_of_the_trace,
    _a_checkpoint,
]


@pytest.mark.parametrize("function", CASES)
def test_what_runs_in_the_backward_has_its_effects_there(function: Callable) -> None:
    found = []
    for run in (function, dynamotor.compile(function, backend="eager")):
        LOG.clear()
        y, seen = run(torch.ones(2, requires_grad=True))
        before = _shown(seen)
        y.sum().backward()
        found.append((before, _shown(seen)))
    assert found[1] == found[0]


def test_what_a_body_makes_it_may_change() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        def body(row: torch.Tensor) -> torch.Tensor:
            parts = [row]
            parts.append(row * 2)
            named = {"sum": parts[0] + parts[1]}
            named["sum"] = named["sum"].sin()
            return named["sum"]

        return torch.vmap(body)(x)

    x = torch.ones(3, 2)
    torch.testing.assert_close(dynamotor.compile(function, fullgraph=True, backend="eager")(x), function(x))
