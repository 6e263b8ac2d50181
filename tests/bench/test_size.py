"""Statements of each room (`python -m bench size`) stay below limits a little above today's sizes. CI prints the
difference that a pull request makes; docs/decisions/statements.md says where the statements are and why.
"""

from __future__ import annotations

import fnmatch

import pytest

from bench import size

LIMITS = {
    ".": 1_015,
    "autograd": 4_943,
    "base": 1_225,
    "capture": 17_407,
    "codegen": 8_815,
    "distributed": 2_060,
    "graph": 6_779,
    "lower": 6_559,
    "runtime": 1_500,
    "step": 2_504,
    "tools": 2_830,
}
XLA = 11_300  # dynamotor-xla


def test_every_room_has_a_limit() -> None:
    assert sorted(size.rooms()) == sorted(LIMITS)


@pytest.mark.parametrize("room", LIMITS)
def test_a_room_keeps_to_its_limit(room: str) -> None:
    assert size.rooms()[room] <= LIMITS[room]


def test_dynamotor_xla_keeps_to_its_limit() -> None:
    assert sum(size.rooms(size.XLA).values()) <= XLA


def test_statements_are_counted_and_not_their_lines() -> None:
    assert size.statements('"""Text."""\nif a:\n    b = (\n        1,\n    )\nelse:\n    c()\n') == 4


def test_every_pattern_of_a_mechanism_names_a_file() -> None:
    names = [
        path.relative_to(size.ROOT / "dynamotor").as_posix()
        for path in (size.ROOT / "dynamotor").rglob("*.py")
    ]
    patterns = [pattern for each in size.MECHANISMS.values() for pattern in each.split()]
    assert not [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]


def test_a_change_of_size_is_told_by_room() -> None:
    before, now = {"dynamotor/base": 10, "dynamotor/step": 5}, {"dynamotor/base": 12, "dynamotor/step": 5}
    (base, total) = size.differences(before, now)
    assert base.split() == ["dynamotor/base", "10", "->", "12", "+2"] and total == "all rooms: +2 statements"


def test_every_file_is_there_for_something() -> None:
    assert sum(size.mechanisms().values()) == sum(size.rooms().values())
