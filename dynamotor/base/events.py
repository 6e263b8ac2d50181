"""One event stream: passes, builds, breaks and recompilations are emitted here; counters and reports listen.
And the log, one logger `dynamotor.<channel>` per channel: DYNAMOTOR_DEBUG=0..7 or DYNAMOTOR_LOG=guards,breaks
turns channels on, as does the logger's own level. And warnings, under the categories of base/errors.py.

>>> with collect() as events:
...     emit("break", reason="print")
>>> events[0].kind
'break'
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from .config import config
from .errors import DynamotorWarning, link, user_line

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
_numbers = itertools.count()

_logger = logging.getLogger("dynamotor")
_loggers = {channel: _logger.getChild(channel) for channel in LEVELS}
_logger.setLevel(logging.WARNING)  # a level for the root logger turns no channel on

# The compilation that is running: "3/1" is the second program of the fourth compiled callable.
compile_id: ContextVar[str] = ContextVar("dynamotor.compile_id", default="")


class _Stderr(logging.Handler):
    """Writes records to the present `sys.stderr`, unless the program has a handler that receives them."""

    def emit(self, record: logging.LogRecord) -> None:
        if any(handler is not self for handler in (*_logger.handlers, *logging.root.handlers)):
            return
        own = vars(record)  # with the fields that `_note` adds
        rank = f" rank {own['rank']}" if own["rank"] is not None else ""
        of = f" {own['compile_id']}" if own["compile_id"] else ""
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        channel = record.name.partition(".")[2]
        text = f"{when}.{record.msecs:03.0f}{rank} [dynamotor:{channel}]{of} {record.getMessage()}"
        print(text, file=sys.stderr, flush=True)


_logger.addHandler(_Stderr())


def _rank() -> int | None:
    """The rank of this process where several train together."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None


def enabled(channel: str) -> bool:
    """Whether text of this channel would be shown."""
    if config.debug >= LEVELS[channel] or channel in config.log.split(","):
        return True
    return _loggers[channel].isEnabledFor(_severity(channel))


def _severity(channel: str) -> int:
    return logging.INFO if LEVELS[channel] <= 2 else logging.DEBUG


def log(channel: str, text: Any) -> None:
    """Send text to the channel's logger when the channel is on; a callable is called only then. Records have
    the attributes `rank` and `compile_id`.
    """
    if not enabled(channel):
        return
    logger, said = _loggers[channel], text() if callable(text) else text
    facts = {"rank": _rank(), "compile_id": compile_id.get()}
    where = user_line()
    file, line = (where.filename, where.lineno) if where else (__file__, 0)
    record = logger.makeRecord(logger.name, _severity(channel), file, line, said, (), None, extra=facts)
    logger.handle(record)  # whatever the logger's level is: settings may have turned the channel on


def new_number() -> int:
    """A number that no other call gives: to name an object, since the id of a freed one is given again."""
    return next(_numbers)


def warn_once(key: str, text: str, category: type[DynamotorWarning] = DynamotorWarning) -> None:
    """Warn at the user's line, once per process and key."""
    if key not in _once:
        _once.add(key)
        where = user_line()
        file, line = (where.filename, where.lineno) if where else (__file__, 0)
        code = re.match(r"\[(DM\d+)\]", text)
        if code and "  more: " not in text:
            text += f"\n  more: {link(code[1])}"
        warnings.warn_explicit(text, category, file, line)


def forget_warnings() -> None:
    """Let every `warn_once` speak again (used by `reset` and tests)."""
    _once.clear()


@dataclass(frozen=True)
class Event:
    """One thing that happened: its kind, its data, when (seconds of `time.perf_counter`), and in which
    compilation.
    """

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    time: float = 0.0
    compile_id: str = ""


Listener = Callable[[Event], None]
_listeners: list[tuple[Listener, tuple[str, ...]]] = []  # with the kinds that each wants; none: all

# counters["frames"]["captured"], counters["breaks"][reason code], counters["fallback"][op], ... for users to
# read.
counters: defaultdict[str, Counter[str]] = defaultdict(Counter)


# Listeners that get nothing from this thread now; other threads' events reach them.
_muted: ContextVar[tuple[Any, ...]] = ContextVar("dynamotor.muted", default=())


def _heard() -> list[tuple[Listener, tuple[str, ...]]]:
    muted = _muted.get()
    return [row for row in tuple(_listeners) if not any(row is other for other in muted)]


def emit(kind: str, **data: Any) -> None:
    """Send an event to every listener; costs nothing without listeners."""
    if _listeners:
        event = Event(kind, data, time.perf_counter(), compile_id.get())
        for listener, kinds in _heard():
            if not kinds or kind in kinds:
                listener(event)


def fall_back(counter: str, **data: Any) -> None:
    """Count what runs in eager PyTorch instead, under `counter`, and send an event of it."""
    counters["fallback"][counter] += 1
    emit("fallback", **data)


def listening(kind: str) -> bool:
    """Whether anybody wants events of this kind: ask before computing data that only an event needs."""
    return bool(_listeners) and any(not kinds or kind in kinds for _, kinds in _heard())


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
    """Send no events from a `with` block: trials that leave nothing behind."""
    before = _muted.set(tuple(_listeners))
    try:
        yield
    finally:
        _muted.reset(before)


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
