"""The fuzzer of late code: its programs are right, and it finds what a removed mechanism would let through."""

from __future__ import annotations

import pytest

from dynamotor.capture import rules_autograd
from dynamotor.graph import modes
from fuzz import late


@pytest.mark.parametrize("n", range(8))
def test_programs_are_right(n: int) -> None:
    assert late.problems(late.write(n), late.BACKENDS[n % len(late.BACKENDS)]) == []


def found(place: str, backend: str = "aot_eager") -> bool:
    texts = [text for text in map(late.write, range(200)) if place in text.partition("def call")[2]]
    return any(late.problems(text, backend) for text in texts[:8])


def test_finds_backwards_that_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_autograd, "reads_late", lambda *fns: "")
    assert found("Part.apply(x)")


def test_finds_modes_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    before, restore = modes._Modes(), modes._Modes.restore
    monkeypatch.setattr(modes._Modes, "restore", lambda self: None)
    try:
        assert found("tensor([99])", "eager")
    finally:
        restore(before)
