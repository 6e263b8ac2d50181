"""Counts of the type annotations, per room: `python tools/count_types.py`. tests/test_types.py limits them.

"ignored": comments `type: ignore`. "any": annotations of parameters, results and variables that are `Any` alone, of all.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "dynamotor", ROOT / "xla" / "dynamotor" / "xla")


def annotations(tree: ast.AST) -> list[ast.expr]:
    """The annotations of parameters, results and variables."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
    return [annotation for annotation in found if annotation is not None]


@functools.cache
def counts() -> dict[str, Counter[str]]:
    """Annotations, those that are `Any`, and `type: ignore` comments of each room."""
    found: dict[str, Counter[str]] = {}
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package).parts
            room = "xla" if package.name == "xla" else parts[0] if len(parts) > 1 else "."
            row, text = found.setdefault(room, Counter()), path.read_text()
            row["ignored"] += text.count("# type: ignore")
            for annotation in annotations(ast.parse(text)):
                row["all"] += 1
                row["any"] += isinstance(annotation, ast.Name) and annotation.id == "Any"
    return found


def main() -> None:
    """Print a line a room, and the sums."""
    rows = dict(counts())
    rows["all rooms"] = sum(rows.values(), Counter())
    for room, row in rows.items():
        share = 100 * row["any"] / max(row["all"], 1)
        print(f"{room:12} {row['all']:6,} annotations, {share:4.1f} % Any, {row['ignored']:4} type: ignore")


if __name__ == "__main__":
    main()
