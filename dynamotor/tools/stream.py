"""What listens to a whole program when its environment asks: nothing else is subscribed, so that nothing
costs when off.

DYNAMOTOR_TRACE=out.jsonl writes each event as a line of JSON; a name that ends in .json gets the Chrome
format, which https://ui.perfetto.dev opens. DYNAMOTOR_REPORT=out.html writes the report when the program
ends. On a terminal, a compilation that takes longer than two seconds shows its current phase.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from typing import IO, Any

from ..base import failures
from ..base.config import config
from ..base.errors import SettingWarning, UsageError
from ..base.events import Event, subscribe, warn_once
from .minify import write_script
from .record import Record
from .report import check_writable, write

# Every kind of event that the stream holds; the docs explain each.
KINDS = (
    "begin",
    "phase",
    "capture",
    "break",
    "recompile",
    "fallback",
    "backend",
    "partition",
    "aten_graph",
    "refuse",
    "kernel",
    "build",
    "code",
    "ddp",
    "bucket",
    "xla.compile",
    "xla.compiled",
    "xla.fallback",
    "xla.partition",
    "xla.flush",
)
_LARGE = frozenset(
    (
        "graph",
        "captured",
        "guards",
        "program",
        "functions",
        "source",
        "python",
        "cpp",
        "triton",
        "kernels",
        "text",
    )
)


def install(terminal: IO[str] = sys.stderr) -> None:
    """Subscribe the listeners that settings and terminal ask for; internal errors write scripts that repeat
    them.
    """
    failures.writer = write_script
    if config.trace and (stream := _stream(_own(config.trace))) is not None:
        subscribe(stream, *KINDS)
    if config.report:
        _report_at_exit(_own(config.report))
    if terminal is not None and terminal.isatty():
        subscribe(Progress(terminal), "begin", "phase")


def _stream(path: str) -> Stream | None:
    """The stream into a file; None, with a message, if it cannot be written."""
    try:
        return Stream(path)
    except OSError as error:
        warn_once("trace", f"DYNAMOTOR_TRACE is ignored: {error}", SettingWarning)
        return None


def _report_at_exit(path: str) -> None:
    """Record for the report; a message at once if it cannot be written."""
    try:
        check_writable(path)
    except UsageError as error:
        warn_once("report", f"DYNAMOTOR_REPORT is ignored: {error}", SettingWarning)
        return
    record = Record()
    record.subscribe()
    atexit.register(_write_report, record, path)


def _own(path: str) -> str:
    """The path, with the rank of a process that is one of several."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return path
    stem, ext = os.path.splitext(path)
    return f"{stem}.rank{os.environ['RANK']}{ext}"


def _write_report(record: Record, path: str) -> None:
    if not (record.captures or record.xla):  # a worker process that compiled nothing
        return
    try:
        written = write(record, path, os.path.basename(sys.argv[0]) or "a program")
    except OSError as error:
        warn_once("report", f"the report was not written: {error}", SettingWarning)
    else:
        print(f"dynamotor: wrote the report {written}", file=sys.stderr)


class Stream:
    """Writes events to a file as they come; each line is there when the event is over."""

    def __init__(self, path: str) -> None:
        self.chrome = path.endswith(".json")
        self.start, self.lock = time.perf_counter(), threading.Lock()
        self.file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115  (open as long as the process lives)
        if self.chrome:
            self.file.write(
                "[\n"
            )  # the format's closing bracket is optional, so that a program may end at any time

    def __call__(self, event: Event) -> None:
        row = self.row(event)
        line = chrome_row(row) if self.chrome else row
        if line is not None:
            with self.lock:
                self.file.write(json.dumps(line, default=_short) + (",\n" if self.chrome else "\n"))

    def row(self, event: Event) -> dict[str, Any]:
        """Kind, seconds since the stream began, process, thread, and the event's own small data."""
        small = {k: v for k, v in event.data.items() if k not in _LARGE}
        return {
            "kind": event.kind,
            "time": round(event.time - self.start, 6),
            "pid": os.getpid(),
            "thread": threading.get_native_id(),
            **({"compile_id": event.compile_id} if event.compile_id else {}),
            **small,
        }


def chrome_row(row: dict[str, Any]) -> dict[str, Any] | None:
    """A row in the Chrome format: a span for a phase, an instant for others; None where a phase begins."""
    kind, at = row.pop("kind"), row.pop("time")
    if kind == "begin":
        return None
    seconds = row.get("seconds", 0.0) if kind == "phase" else 0.0
    span = {"ph": "X", "dur": seconds * 1e6} if kind == "phase" else {"ph": "i", "s": "t"}
    return {
        "name": row.get("name", kind) if kind == "phase" else kind,
        "cat": kind,
        "ts": (at - seconds) * 1e6,
        "pid": row.pop("pid"),
        "tid": row.pop("thread"),
        "args": row,
        **span,
    }


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else text[:297] + "..."


class Progress:
    """One line on a terminal while a compilation takes longer than `patience` seconds; it goes when the
    compilation is over.
    """

    def __init__(self, terminal: IO[str], patience: float = 2.0) -> None:
        self.terminal, self.patience = terminal, patience
        self.began = self.ended = float("-inf")
        self.depth, self.thread, self.built, self.shown = 0, 0, 0, False

    def __call__(self, event: Event) -> None:
        if self.depth and threading.get_ident() != self.thread:  # builds run beside the compiling thread
            self.built += event.kind == "phase" and event.data["name"] == "build"
        elif event.kind == "begin":
            if not self.depth and event.time - self.ended > 1:  # not the next part of the same compilation
                self.began, self.built = event.time, 0
            self.depth, self.thread = self.depth + 1, threading.get_ident()
        else:
            self.depth, self.ended = max(self.depth - 1, 0), event.time
        if event.time - self.began > self.patience and self.depth:
            self.shown = True
            text = (
                f"dynamotor: compiling for {event.time - self.began:.0f} s: {event.data['name']}, "
                f"{self.built} libraries built"
            )
            self.terminal.write(f"\r\x1b[2K{text}")
        elif self.shown and not self.depth:
            self.shown = False
            self.terminal.write("\r\x1b[2K")
        self.terminal.flush()
