"""Objects that a call replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynamotor


class Suspended:
    it: Any = None


@pytest.mark.regression
def test_what_a_call_replaces_is_neither_looked_at_nor_kept() -> None:
    log: list[str] = []

    def waiting() -> Any:
        try:
            yield 1
        finally:
            log.append("closed")

    def function(x: torch.Tensor, thing: Suspended, new: Any) -> torch.Tensor:
        held.it = new
        return x + 1

    held = Suspended()
    compiled = dynamotor.compile(function, backend="eager")
    dynamotor.counters.clear()
    for then in (None, 1, "text", torch.ones(3), waiting()):
        if not isinstance(then, (int, str, torch.Tensor, type(None))):
            next(then)
        held.it, then = then, None
        compiled(torch.ones(2), held, [])
    assert log == ["closed"]
    assert dynamotor.counters["capture"]["graphs"] == 1
