"""Says why graphs were compiled and where they were cut, with the line that did it; for a whole program with
`PT_XLA_DEBUG=1`.

>>> with collect() as findings:
...     train()
>>> print(findings[0])
Compilation Analysis: new shapes: float32[8, 4] -> float32[6, 4]; 31 ops, run by mark_step at train.py:12 in
train
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from dynamotor.extension_api import Event, UserLine, subscribe

# Flushes that a program asks for; all others cut a graph because a value is needed.
_BARRIERS = ("mark_step", "eager mode")
_CURES = {
    "item": "keep the value in a tensor, or read it in a step closure (xm.add_step_closure)",
    "print": "print in a step closure (xm.add_step_closure)",
    "cpu": "copy to the CPU after mark_step",
    "fallback": "write it with other ops, or add a lowering (docs/xla-op-lowering.md)",
}


@dataclass(frozen=True)
class Finding:
    """One compilation ("Compilation"), one cut of a graph ("Cut"), or one op that ran on the CPU
    ("Fallback").
    """

    kind: str
    cause: str
    reason: str
    nodes: int
    line: UserLine | None

    def __str__(self) -> str:
        at = f" at {self.line.filename}:{self.line.lineno} in {self.line.function}" if self.line else ""
        if self.kind == "Compilation":
            return f"Compilation Analysis: {self.reason}; {self.nodes} ops, run by {self.cause}{at}"
        if self.kind == "Cut":
            advice = f"; {self.reason}" if self.reason else ""
            return f"Execution Analysis: a graph of {self.nodes} ops is cut by {self.cause}{at}{advice}"
        return f"Fallback Analysis: {self.cause} runs on the CPU ({self.reason}){at}"


def finding_of(event: Event) -> Finding | None:
    """The text of an event; None where it is not worth a line."""
    data = event.data
    if event.kind == "xla.compile":
        return Finding("Compilation", data["cause"], data["reason"], data["nodes"], data["line"])
    if event.kind == "xla.flush" and data["cause"] not in _BARRIERS and data["nodes"]:
        cure = _CURES.get(data["cause"].split()[0], "")
        return Finding("Cut", data["cause"], cure, data["nodes"], data["line"])
    if event.kind == "xla.fallback":
        return Finding("Fallback", data["op"], data["reason"], 1, data["line"])
    return None


def _each(take: Callable[[Finding], Any]) -> Callable[[], None]:
    """Call `take` with each finding from now on; the returned function ends it."""

    def listen(event: Event) -> None:
        finding = finding_of(event)
        if finding is not None:
            take(finding)

    return subscribe(listen)


@contextlib.contextmanager
def collect() -> Iterator[list[Finding]]:
    """The findings of a `with` block, as a list."""
    found: list[Finding] = []
    remove = _each(found.append)
    try:
        yield found
    finally:
        remove()


def start(file: TextIO | None = None) -> Callable[[], None]:
    """Print each finding, to `file` (standard error), from now on; the returned function ends it."""

    def show(finding: Finding) -> None:
        source = str(finding.line).partition("\n")[2] if finding.line else ""
        print(str(finding) + (f"\n{source}" if source else ""), file=file or sys.stderr, flush=True)

    return _each(show)


def start_from_environment() -> None:
    """What PT_XLA_DEBUG=1 (or PT_XLA_DEBUG_LEVEL) asks for: print to standard error, or append to
    $PT_XLA_DEBUG_FILE.
    """
    if os.environ.get("PT_XLA_DEBUG", "0") in ("", "0") and os.environ.get("PT_XLA_DEBUG_LEVEL", "0") in (
        "",
        "0",
    ):
        return
    path = os.environ.get("PT_XLA_DEBUG_FILE")
    start(open(path, "a") if path else None)  # noqa: SIM115 - open until the process ends
