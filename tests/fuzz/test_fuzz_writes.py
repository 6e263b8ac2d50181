"""The fuzzer of writes: programs that eager runs, and faults that it finds."""

import pytest

from dynamotor.lower import claim, in_place, lower_graph
from fuzz import fusion, writes


def test_programs_repeat_and_write():
    programs = [writes.generated(3, n, "native") for n in range(40)]
    assert programs == [writes.generated(3, n, "native") for n in range(40)]
    assert sum("_(" in program.source() for program in programs) > 30


def test_programs_are_right():
    programs = [writes.generated(3, n, "native") for n in range(4)]
    assert fusion.problems(programs, "native") == [[]] * 4


@pytest.mark.parametrize("checked", [False, True])
def test_a_read_behind_a_write_is_found(monkeypatch, checked):
    """Memory is shared although the old value is read later: numbers differ, or the verifier refuses it."""
    monkeypatch.setattr(in_place, "_why_stale", lambda *_: None)
    monkeypatch.setattr(claim, "_is_read_later", lambda *_: False)
    if not checked:
        monkeypatch.setattr(lower_graph, "verify_in_place", lambda *_: None)
    programs = [writes.generated(7, n, "native") for n in (1, 10)]
    for found in fusion.problems(programs, "native"):
        assert ("DM913" in found[0]) if checked else ("elements differ" in found[0])
