"""Timing that survives a noisy machine: two programs run in turns, and the quoted figure is the median of
their ratios.

>>> timing = interleave(eager_step, compiled_step, seconds=5)
>>> timing.speedup, timing.low, timing.high      # median, 25th and 75th percentile of eager / compiled
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call (medians), and eager time over compiled time: median and quartiles over the
    rounds.
    """

    eager_ms: float
    compiled_ms: float
    speedup: float
    low: float
    high: float
    rounds: int


def once(fn: Callable[[], object], repeat: int = 1) -> float:
    """Seconds of one call, the mean of `repeat` calls in a row."""
    start = time.perf_counter()
    for _ in range(repeat):
        fn()
    return (time.perf_counter() - start) / repeat


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """25th percentile, median and 75th percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, mid, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, mid, high


def interleave(
    eager: Callable[[], object],
    compiled: Callable[[], object],
    *,
    seconds: float = 6.0,
    least: int = 5,
    most: int = 200,
) -> Timing:
    """Run both in turns (each turn long enough to time) for about `seconds`, after two warm-up calls of
    each.
    """
    for fn in (eager, compiled, eager, compiled):
        fn()
    repeat = max(1, int(2e-3 / max(once(eager), 1e-7)))
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < least or (time.perf_counter() < end and len(pairs) < most):
        if len(pairs) % 2:
            b, a = once(compiled, repeat), once(eager, repeat)
        else:
            a, b = once(eager, repeat), once(compiled, repeat)
        pairs.append((a, b))
    low, mid, high = quartiles([a / b for a, b in pairs])
    return Timing(
        statistics.median(a for a, _ in pairs) * 1e3,
        statistics.median(b for _, b in pairs) * 1e3,
        mid,
        low,
        high,
        len(pairs),
    )
