"""Plain English in the package and its documents: the rules of CONTRIBUTING.md that a pattern can find.

The limits only go down: a change that rewrites such phrases lowers them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A clause with "what" as subject or object, memory that "lies", and persons who are none.
CALQUES = re.compile(
    r"\bwhat (it|is|are|was|were|a|an|the|they|that)\b|\b(lie|lies|lay)\b|\b(nobody|somebody)\b",
    re.IGNORECASE,
)
LIMITS = {
    "dynamotor/autograd": 5,
    "dynamotor/base": 1,
    "dynamotor/capture": 13,
    "dynamotor/codegen": 8,
    "dynamotor/csrc": 2,
    "dynamotor/distributed": 2,
    "dynamotor/graph": 4,
    "dynamotor/lower": 2,
    "dynamotor/runtime": 0,
    "dynamotor/step": 2,
    "dynamotor/tools": 3,
    "dynamotor": 0,  # its own files
    "docs": 7,
    "docs/decisions": 4,
    "docs/debug": 0,
    "docs/guide": 0,
    "docs/results": 4,
    "bench/": 3,
    "fuzz/": 5,
    "tests/": 16,
    "xla/": 9,
}


def calques(folder: str) -> dict[str, list[str]]:
    """The phrases in each file of a folder; those of rooms and of folders with a slash also in their subfolders."""
    deep = folder.startswith("dynamotor/") or folder.endswith("/")
    paths = (ROOT / folder).rglob("*") if deep else (ROOT / folder).glob("*")
    found = {
        str(path.relative_to(ROOT)): [m[0] for m in CALQUES.finditer(path.read_text())]
        for path in paths
        if path.suffix in (".py", ".md", ".c", ".h") and "build" not in path.parts
    }
    return {path: phrases for path, phrases in found.items() if phrases}


@pytest.mark.parametrize("folder", LIMITS)
def test_calqued_phrases_do_not_increase(folder: str) -> None:
    found = calques(folder)
    assert sum(map(len, found.values())) <= LIMITS[folder], found


def test_the_rules_are_written_down() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert "## Prose" in text and "tests/test_prose.py" in text
