"""One event stream: passes, builds, breaks and recompilations are emitted here; counters and reports listen.
And the log ladder: DYNAMOTOR_DEBUG=0..7 picks a level, DYNAMOTOR_LOG=guards,breaks picks channels by name.

>>> with collect() as events:
...     emit("break", reason="print")
>>> events[0].kind
'break'
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .config import config

# Fallbacks are shown with breaks and recompilations. 5: graphs and kernels after each stage, 6: graphs after
# each pass, 7: every bytecode instruction.
LEVELS: dict[str, int] = {
    "breaks": 1,
    "recompiles": 1,
    "fallbacks": 1,
    "timings": 2,
    "guards": 3,
    "code": 4,
    "graphs": 5,
    "passes": 6,
    "bytecode": 7,
}

_once: set[str] = set()


def enabled(channel: str) -> bool:
    """Whether text of this channel would be shown."""
    return config.debug >= LEVELS[channel] or channel in config.log.split(",")


def log(channel: str, text: Any) -> None:
    """Write text to stderr when the channel is on; a callable is called only then."""
    if enabled(channel):
        print(f"[dynamotor:{channel}] {text() if callable(text) else text}", file=sys.stderr, flush=True)


def warn_once(key: str, text: str) -> None:
    """Warn the user, once per process and key."""
    if key not in _once:
        _once.add(key)
        print(f"dynamotor: {text}", file=sys.stderr, flush=True)


def forget_warnings() -> None:
    """Let every `warn_once` speak again (used by `reset` and tests)."""
    _once.clear()


@dataclass(frozen=True)
class Event:
    """One thing that happened: its kind, its data and when (seconds of `time.perf_counter`)."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    time: float = 0.0


Listener = Callable[[Event], None]
_listeners: list[tuple[Listener, tuple[str, ...]]] = []  # with the kinds that each wants; none: all

# counters["frames"]["captured"], counters["breaks"][reason code], counters["fallback"][op], ... for users to
# read.
counters: defaultdict[str, Counter[str]] = defaultdict(Counter)


def emit(kind: str, **data: Any) -> None:
    """Send an event to every listener; costs nothing when nobody listens."""
    if _listeners:
        event = Event(kind, data, time.perf_counter())
        for listener, kinds in tuple(_listeners):
            if not kinds or kind in kinds:
                listener(event)


def fall_back(counter: str, **data: Any) -> None:
    """Count what runs in eager PyTorch instead, under `counter`, and send an event of it."""
    counters["fallback"][counter] += 1
    emit("fallback", **data)


def listening(kind: str) -> bool:
    """Whether anybody wants events of this kind: ask before computing data that only an event needs."""
    return any(not kinds or kind in kinds for _, kinds in _listeners)


def subscribe(listener: Listener, *kinds: str) -> Callable[[], None]:
    """Add a listener of events of these kinds (of all, when none are given); the returned function removes
    it.
    """
    row = listener, kinds
    _listeners.append(row)
    return lambda: _listeners.remove(row)


@contextlib.contextmanager
def collect(*kinds: str) -> Iterator[list[Event]]:
    """Collect the events (of the given kinds, or all) that a `with` block emits."""
    found: list[Event] = []
    remove = subscribe(found.append, *kinds)
    try:
        yield found
    finally:
        remove()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nobody hears of what a `with` block does: trials that leave nothing behind."""
    listeners = _listeners.copy()
    _listeners.clear()
    try:
        yield
    finally:
        _listeners[:] = listeners


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Time a phase: events of kinds "begin" and "phase" stand around it, and its seconds are added to
    `phase_seconds`.
    """
    start = time.perf_counter()
    emit("begin", name=name)
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        phase_seconds[name] += seconds
        emit("phase", name=name, seconds=seconds)
        log("timings", lambda: f"{name}: {seconds * 1e3:.1f} ms")


phase_seconds: defaultdict[str, float] = defaultdict(float)
