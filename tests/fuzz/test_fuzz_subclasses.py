"""The fuzzer of tensor subclasses: its programs are right, and it finds a lost inner tensor and a missed context."""

from __future__ import annotations

import pytest

from dynamotor.autograd import desugar
from dynamotor.capture import rules_wrappers
from fuzz import subclasses


@pytest.mark.parametrize("n", range(8))
def test_programs_are_right(n: int) -> None:
    assert subclasses.problems(subclasses.write(n), subclasses.BACKENDS[n % len(subclasses.BACKENDS)]) == []


def test_a_seed_has_one_program() -> None:
    assert subclasses.write(5) == subclasses.write(5)


def found() -> bool:
    return any(subclasses.problems(subclasses.write(n), "aot_eager") for n in range(12))


@pytest.mark.slow
def test_finds_a_lost_inner_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = desugar._parts

    def first_for_all(value, spec):
        leaves = list(parts(value, spec))
        return leaves[:1] * len(leaves)

    monkeypatch.setattr(desugar, "_parts", first_for_all)
    assert found()


def test_finds_a_context_without_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_wrappers, "_asks_for", lambda *row: lambda tensor: True)
    program = subclasses.Program(("scaled",), (False,), ("return x0 * 1,",))
    assert subclasses.problems(program, "aot_eager")
