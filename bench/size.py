"""Python statements by room, so that formatting does not matter: `python -m bench size`.

A statement is a node of `ast` that is one; a docstring is one too. tests/tools/test_size.py has each room's
limit.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def statements(text: str) -> int:
    """The statements of a file's text."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


@functools.cache
def rooms(package: Path = ROOT / "dynamotor") -> Counter[str]:
    """Statements of each folder of the package; files beside them are "."."""
    found: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        found[parts[0] if len(parts) > 1 else "."] += statements(path.read_text())
    return found


def main() -> None:
    """Print the package's rooms, and what lies beside the package."""
    found = rooms()
    for room, count in sorted(found.items()):
        print(f"{count:7,} dynamotor/{room}")
    print(f"{sum(found.values()):7,} dynamotor")
    for other in ("bench", "fuzz", "tests", "examples", "tools"):
        print(f"{sum(rooms(ROOT / other).values()):7,} {other}")


if __name__ == "__main__":
    main()
