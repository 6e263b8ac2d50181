"""Several programs timed in turns, and means of ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def geometric_mean(values: list[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    return statistics.geometric_mean(values) if values else float("nan")


def turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    finish: Callable[[], object],
    least: int = 5,
    turn: float = 0.03,
) -> list[dict[str, float]]:
    """Seconds a call of each of several programs, run in turns of at least `turn` seconds for about `seconds`
    in all.

    `finish` waits for the work that a turn has started (on a GPU). The order changes from round to round.
    """
    repeat: dict[str, int] = {}
    for name, call in calls.items():
        call()
        finish()
        repeat[name] = max(1, int(turn / max(_turn(call, finish, 2), 1e-7)))
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    names = list(calls)
    while len(rounds) < least or time.perf_counter() < end:
        names = names[1:] + names[:1]
        rounds.append({name: _turn(calls[name], finish, repeat[name]) for name in names})
    return rounds


def _turn(call: Callable[[], object], finish: Callable[[], object], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    finish()
    return (time.perf_counter() - start) / repeat
