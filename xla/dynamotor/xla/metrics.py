"""Counters and times of the XLA device; `debug.metrics` prints them in the shape that users of torch_xla
know.

>>> metrics.counter("xla::add")
>>> with metrics.timing("CompileTime"):
...     compile_it()
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator

from dynamotor.extension_api import user_line as user_line

from . import _C

counters: Counter[str] = Counter()
# Counters that are kept elsewhere (a hot path counts in place): (read, clear).
sources: list[tuple[Callable[[], Counter[str]], Callable[[], None]]] = []
timings: defaultdict[str, _C.Timing] = defaultdict(_C.Timing)


class Bytes:
    """Samples of bytes: their number, their sum, and the last 1,024 as (when by `time.perf_counter()`,
    bytes)."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0
        self.samples: deque[tuple[float, int]] = deque(maxlen=1024)

    def add(self, size: int) -> None:
        """Add a sample."""
        self.count, self.total = self.count + 1, self.total + size
        self.samples.append((time.perf_counter(), size))


amounts: defaultdict[str, Bytes] = defaultdict(Bytes)


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


def clear_counters() -> None:
    """Forget all counters."""
    counters.clear()
    for _, clear_source in sources:
        clear_source()


def clear() -> None:
    """Forget all counters and times."""
    clear_counters()
    timings.clear()
    amounts.clear()
