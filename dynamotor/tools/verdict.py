"""The head of a report: how much ran compiled, how fast, the first thing to fix, and all that was left to
eager.

>>> verdict = Verdict.of(record)
>>> print(verdict.first)
[DM211] print() is called at model.py:12 in forward: print outside the compiled function
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..capture.compiled_share import Counts
from .record import Record

SLOWER = 1.05  # so many times eager's time are no noise


@dataclass(frozen=True)
class Times:
    """Seconds of one call with its backward, both ways; the part of a forward outside of graphs."""

    compiled: float
    eager: float
    outside: float

    @property
    def speed(self) -> float:
        """How many times as fast as eager."""
        return self.eager / self.compiled


@dataclass(frozen=True)
class Left:
    """What one reason leaves to eager: where, how many torch calls (0: not counted), why."""

    name: str
    calls: int
    why: str


@dataclass(frozen=True)
class Verdict:
    """share: of torch calls that ran compiled, None where none was counted. first: the first thing to fix."""

    share: float | None
    counts: Counts
    times: Times | None
    left: list[Left]
    first: str

    @staticmethod
    def of(record: Record, times: Times | None = None) -> Verdict:
        """The verdict on a record."""
        counts = Counts(
            sum(each.compiled for _, each in record.shares.values()),
            sum((each.eager for _, each in record.shares.values()), Counter()),
        )
        known = counts.compiled + counts.eager.total() > 0
        left = sorted(_left(record), key=lambda one: -one.calls)
        return Verdict(counts.share if known else None, counts, times, left, _first(record, left, times))


def _left(record: Record) -> Iterator[Left]:
    """Breaks and whole functions, functions that are never captured, then parts of graphs and steps."""
    counted = set()
    for name, counts in record.shares.values():
        for why, calls in counts.eager.items():
            counted.add(why)
            yield Left(name, calls, why)
    for capture in record.captures:
        text = str(capture.reason or "")
        whole = capture.reason is not None and capture.graph is None and not capture.code
        if whole and not any(_same(text, c) for c in counted):
            yield Left(capture.name, 0, f"no part of it was captured: {text}")
    for name, why in record.native.items():
        yield Left(name, 0, f"never captured: {why}")
    parts = Counter((found.get("name", ""), _part(found)) for found in record.fallbacks)
    for (name, why), _ in parts.items():
        yield Left(name, 0, why)


def _same(reason: str, counted: str) -> bool:
    """Whether the text of a break and a counted reason name the same break."""
    return counted.partition(" at ")[0] in reason


def _part(found: dict[str, str]) -> str:
    """A "fallback" event in words."""
    what, code = found.get("what", "a part"), found.get("code", "")
    where = f" at {found['where']}" if found.get("where") else ""
    return f"{f'[{code}] ' if code else ''}{what}{where}: {found.get('reason', '')}"


def _first(record: Record, left: list[Left], times: Times | None) -> str:
    """The reason that leaves most torch calls to eager, with its cure; then the costliest kernel."""
    if left:
        why = left[0].why
        cures = (c.reason.cure for c in record.captures if c.reason is not None and c.reason.what in why)
        cure = next(cures, "")
        return f"{why}{': ' + cure if cure else ''}"
    steps = [step for program in record.programs for step in program.steps if step.seconds]
    if times is not None and times.speed < 1 / SLOWER and steps:
        costly = max(steps, key=lambda step: step.seconds)
        inside = sum(step.seconds for step in steps)
        if inside < times.compiled / 2:
            return "its kernels take less than half of the time: the inputs are too small to gain anything"
        return f"the costliest step is {costly.name}"
    return ""
