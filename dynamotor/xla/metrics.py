"""Counters and times of the XLA device; `debug.metrics` prints them in the shape that users of torch_xla
know.

>>> metrics.counter("xla::add")
>>> with metrics.timing("CompileTime"):
...     compile_it()
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from dynamotor import _C

from ..base.errors import UserLine

counters: Counter[str] = Counter()
# Counters that are kept elsewhere (a hot path counts in place): (read, clear).
sources: list[tuple[Callable[[], Counter[str]], Callable[[], None]]] = []
timings: defaultdict[str, _C.Timing] = defaultdict(_C.Timing)


def counter(name: str, n: int = 1) -> None:
    """Add to a counter."""
    counters[name] += n


@contextlib.contextmanager
def timing(name: str) -> Iterator[None]:
    """Time a block."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timings[name].since(start)


def all_counters() -> Counter[str]:
    """Every counter by name."""
    total = Counter(counters)
    for read, _ in sources:
        total.update(read())
    return total


def clear() -> None:
    """Forget all counters and times."""
    counters.clear()
    for _, clear_source in sources:
        clear_source()
    timings.clear()


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = os.path.dirname(contextlib.__file__) + os.sep
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("torch", "jax", "jaxlib"))


def user_line() -> UserLine | None:
    """The innermost line of the running program that is neither ours nor a library's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (
            name.startswith((_PACKAGE, "<")) or any(part in name for part in _LIBRARIES) or _is_standard(name)
        ):
            return UserLine(name, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def _is_standard(name: str) -> bool:
    return name.startswith(_STANDARD) and "site-packages" not in name
