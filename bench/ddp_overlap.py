"""From a profiler's trace: how much of the communication of a training step ran beside computation.

>>> evidence(trace_events(profiler))["share"]  # 0.93: of the time in which all-reduces ran, kernels ran too
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

MARKER = "sinh_"  # name of a kernel launched between two steps, to tell them apart
_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}
_GAP = 20.0  # µs: kernels closer than this are drawn as one
Span = tuple[float, float]


def trace_events(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """The events of a profile, as written for trace viewers: categories and streams are in no other public
    form.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def is_collective(name: str) -> bool:
    """Whether a kernel (NCCL) or an operation on a CPU (gloo) communicates."""
    return name.lower().startswith(("nccl", "gloo:"))


def spans_of(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """(name, start, end) in µs of what ran on the GPU, or else on the CPU, behind the marker."""
    found = [e for e in events if e.get("ph") == "X" and e.get("cat") in _KINDS]
    if not found:
        found = [
            e
            for e in events
            if e.get("ph") == "X"
            and e.get("cat") in ("cpu_op", "user_annotation")
            and e["name"].startswith(("aten::", "gloo:"))
        ]
    spans = [(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in found]
    after = max((end for name, _, end in spans if MARKER.rstrip("_") in name), default=0.0)
    return [span for span in spans if span[1] >= after]


def evidence(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Milliseconds of collectives, of other work, of both at once; `share` of the collectives' time that was
    covered, and the intervals of each lane from the start of the step."""
    spans = spans_of(events)
    collective = merged([(a, b) for name, a, b in spans if is_collective(name)])
    other = merged([(a, b) for name, a, b in spans if not is_collective(name)])
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in collective for c, d in other)
    time = sum(b - a for a, b in collective)
    start = min((a for _, a, _ in spans), default=0.0)
    return {
        "collectives_ms": time / 1e3,
        "kernels_ms": sum(b - a for a, b in other) / 1e3,
        "both_ms": both / 1e3,
        "share": both / time if time else None,
        "step_ms": (max((b for *_, b in spans), default=start) - start) / 1e3,
        "count": sum(is_collective(name) for name, *_ in spans),
        "lanes": {
            "kernels": _milliseconds(merged(other, _GAP), start),
            "collectives": _milliseconds(collective, start),
        },
    }


def _milliseconds(spans: Sequence[Span], start: float) -> list[list[float]]:
    return [[round((a - start) / 1e3, 3), round((b - start) / 1e3, 3)] for a, b in spans]


def merged(spans: Sequence[Span], gap: float = 0.0) -> list[Span]:
    """Intervals in order, those that overlap or are closer than `gap` as one."""
    result: list[Span] = []
    for a, b in sorted(spans):
        if result and a <= result[-1][1] + gap:
            result[-1] = result[-1][0], max(b, result[-1][1])
        else:
            result.append((a, b))
    return result
