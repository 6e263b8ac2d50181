"""The log ladder: DYNAMOTOR_DEBUG=0..7 picks a level, DYNAMOTOR_LOG=guards,breaks picks channels by name.

1 breaks, recompilations and fallbacks, 2 timings, 3 guards, 4 generated code, 5 graphs and kernels after each
stage, 6 graphs after each pass, 7 every bytecode instruction.
"""

from __future__ import annotations

import sys
from typing import Any

from .config import config

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
