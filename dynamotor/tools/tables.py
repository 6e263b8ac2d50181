"""Tables and counts in plain text."""

from __future__ import annotations

from collections.abc import Sequence


def render(rows: list[list[str]], header: Sequence[str]) -> str:
    """A header and rows of as many cells, in columns."""
    widths = [max(len(r[i]) for r in [list(header), *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(r, widths)).rstrip() for r in [list(header), *rows]
    )


def counted(n: int, noun: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
