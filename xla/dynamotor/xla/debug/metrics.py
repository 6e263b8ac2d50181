"""Counters and times of the device, and the report that users of torch_xla know.

>>> import dynamotor.xla.debug.metrics as met
>>> print(met.metrics_report())
Metric: CompileTime
  TotalSamples: 2
  Accumulator: 028ms453.120us
...
"""

from __future__ import annotations

import time
from typing import Any

from .. import metrics as _metrics
from ..metrics import (
    clear as clear_all,  # noqa: F401
    clear_counters,  # noqa: F401
)

_PERCENTILES = (1, 5, 10, 20, 50, 80, 90, 95, 99)
_SHORT_COUNTERS = ("CachedCompile", "UncachedCompile", "MarkStep")
_SHORT_METRICS = (
    "CompileTime",
    "ExecuteTime",
    "ExecuteReplicatedTime",
    "TransferToDeviceTime",
    "TransferFromDeviceTime",
)
_NANOSECONDS = 1e9


# Names of torch_xla for what has another one here, or is the same thing.
_ALSO = {"TensorToData": "TransferToDeviceTime", "SyncTensorsToData": "TransferFromDeviceTime"}


def counter_names() -> list[str]:
    """The names of all counters that have counted something."""
    return sorted(name for name, value in _metrics.all_counters().items() if value)


def counter_value(name: str) -> int | None:
    """A counter's value; None where it has not counted anything."""
    return _metrics.all_counters().get(name) or None


def metric_names() -> list[str]:
    """The names of all times that were taken, and of the bytes that were moved."""
    return sorted(
        [
            *_metrics.timings,
            *_metrics.amounts,
            *[name for name, same in _ALSO.items() if same in _metrics.timings],
        ]
    )


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """(number of samples, their sum, the latest samples as (when, value)); None where there are none.

    Values are nanoseconds, or bytes ("OutboundData", "InboundData"); `when` is seconds since 1970. The list
    is limited, number and sum are not.
    """
    taken = _timing(name) or _metrics.amounts.get(name)
    if taken is None:
        return None
    unit = 1 if name in _metrics.amounts else _NANOSECONDS
    epoch = time.time() - time.perf_counter()
    samples = [(epoch + when, value * unit) for when, value in taken.samples]
    return taken.count, taken.total * unit, samples


def _timing(name: str) -> Any:
    return _metrics.timings.get(_ALSO.get(name, name))


def clear_metrics() -> None:
    """Forget all times and amounts."""
    _metrics.timings.clear()
    _metrics.amounts.clear()


def executed_fallback_ops() -> list[str]:
    """The ops that ran on the CPU because they have no lowering, or none for the arguments they got
    (`aten::unique`).
    """
    return [name for name in counter_names() if "::" in name and not name.startswith("xla::")]


def metrics_report() -> str:
    """All times and counters as text."""
    return _report(metric_names(), counter_names())


def short_metrics_report(
    counter_names: list[str] | None = None, metric_names: list[str] | None = None
) -> str:
    """The named times and counters as text; those of compiling, running and transfers where none are
    named.
    """
    return _report(list(metric_names or _SHORT_METRICS), list(counter_names or _SHORT_COUNTERS))


def _report(metric_names: list[str], counter_names: list[str]) -> str:
    lines = [line for name in metric_names if _timing(name) for line in _metric_lines(name)]
    for name in metric_names:
        if amount := _metrics.amounts.get(name):
            total = f"{amount.total / 2**20:.2f}MB"
            lines += [f"Metric: {name}", f"  TotalSamples: {amount.count}", f"  Accumulator: {total}"]
    counters = _metrics.all_counters()
    for name in counter_names:
        if counters.get(name):
            lines += [f"Counter: {name}", f"  Value: {counters[name]}"]
    return "\n".join(lines) + "\n" if lines else ""


def _metric_lines(name: str) -> list[str]:
    timing = _timing(name)
    samples = timing.samples
    lines = [
        f"Metric: {name}",
        f"  TotalSamples: {timing.count}",
        f"  Accumulator: {_duration(timing.total)}",
    ]
    elapsed = samples[-1][0] - samples[0][0]
    if elapsed > 0:
        lines.append(f"  ValueRate: {_duration(sum(s for _, s in samples) / elapsed)} / second")
        lines.append(f"  Rate: {len(samples) / elapsed:g} / second")
    ordered = sorted(seconds for _, seconds in samples)
    percentiles = [
        f"{p}%={_duration(ordered[min(len(ordered) - 1, p * len(ordered) // 100)])}" for p in _PERCENTILES
    ]
    return [*lines, "  Percentiles: " + "; ".join(percentiles)]


def _duration(seconds: float) -> str:
    """A time in the report's notation: 06m09s401ms746.001us, without leading units that are zero."""
    microseconds = round(seconds * 1e9) / 1e3
    text = ""
    for unit, size, digits in (
        ("d", 86400e6, 2),
        ("h", 3600e6, 2),
        ("m", 60e6, 2),
        ("s", 1e6, 2),
        ("ms", 1e3, 3),
    ):
        count, microseconds = divmod(microseconds, size)
        if count or text or unit == "ms":
            text += f"{int(count):0{digits}d}{unit}"
    return f"{text}{microseconds:07.3f}us"
