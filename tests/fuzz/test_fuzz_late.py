"""The fuzzer of late code: its programs are right, and it finds the faults that a removed mechanism would let through."""

from __future__ import annotations

from typing import Any

import pytest

from dynamotor.capture import checkpoint_reads, op_state, rules_autograd
from dynamotor.graph import modes
from fuzz import late
from fuzz.late import Call, Place, Program
from fuzz.late_parts import PLACES, READS

# A backward behind a change, twice.
CALLS = tuple(Call((), ((0, value),), "backward", 2, 3) for value in (3.0, 7.0))


def program(name: str, read: str, **options: Any) -> Program:
    return Program((Place(name, read, **{"effect": "pass", "before": "x.sin()", **options}),), CALLS)


@pytest.mark.parametrize("n", range(12))
def test_programs_are_right(n: int) -> None:
    assert late.problems(late.write(n), late.BACKENDS[n % len(late.BACKENDS)]) == []


@pytest.mark.parametrize("name", PLACES)
def test_each_place_is_right(name: str) -> None:
    for read in ("holder.k", "K"):
        assert late.problems(program(name, read, effect="LOG.append(1)"), "aot_eager") == []


@pytest.mark.parametrize("read", READS)
def test_each_read_is_right(read: str) -> None:
    for name in ("hook of a function", "checkpoint", "forward"):
        assert late.problems(program(name, read), "aot_eager") == []


def test_finds_backwards_that_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_autograd, "reads_late", lambda *fns: "")
    assert late.problems(program("backward", "holder.k"), "aot_eager")


def test_finds_callables_that_are_taken_for_code(monkeypatch: pytest.MonkeyPatch) -> None:
    is_code = op_state._is_code
    monkeypatch.setattr(op_state, "_is_code", lambda value: callable(value) or is_code(value))
    assert late.problems(program("hook", "held_weakly().k"), "aot_eager")


def test_finds_checkpoints_of_written_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_reads._Contents, "question", lambda self, args: lambda gradients: None)
    assert late.problems(program("checkpoint", "T.clone()"), "eager")


def test_finds_modes_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    before, restore = modes._Modes(), modes._Modes.restore
    monkeypatch.setattr(modes._Modes, "restore", lambda self: None)
    try:
        assert late.problems(program("region", "1.5", row=99), "eager")
    finally:
        restore(before)


def test_reduce_keeps_a_program_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_autograd, "reads_late", lambda *fns: "")
    place = Place("backward", "holder.k", "pass", "")
    large = Program((Place("loop", "1.5", "pass", "x.sin()"), place), (Call((), ((1, 5.0),), "twice", 3, 1),))
    small = late.reduce(large, "aot_eager")
    assert small.places == (place,) and late.problems(small, "aot_eager")
