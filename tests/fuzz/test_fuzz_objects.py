"""The fuzzer of objects: programs of a fixed seed, and a fault that it must see."""

from __future__ import annotations

import pytest

from dynamotor.capture.values import user_object
from fuzz import objects


@pytest.mark.parametrize("outside", [False, True])
def test_some_programs_are_right(outside: bool) -> None:
    for seed in range(30):
        assert objects.problems(objects.write(seed), outside) == []


def test_a_copy_in_the_place_of_an_object_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["a = Dict(a=1)", "b = 1", "c = 2", "b = a.keys()", 'a["z"] = c']
    assert objects.problems(lines, outside=False) == []
    monkeypatch.setattr(user_object, "isinstance", lambda value, kinds: False, raising=False)
    assert objects.problems(lines, outside=False)


def test_reduce_keeps_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "problems", lambda lines, outside: ["x"] * ("a += b" in lines))
    assert objects.reduce(["a = 1", "b = 2", "c = 3", "a = b", "a += b", "del c[0]"], False)[3:] == ["a += b"]
