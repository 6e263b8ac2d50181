"""`python -m dynamotor bench --step --profile`: where the GPU's time of a whole step goes, beside the
compiled forward and backward with the eager optimizer: milliseconds and launches by kind of kernel, and the
longest of each way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dynamotor.base.events import collect
from dynamotor.tools.tables import render

from .gpu_programs import kernel_times, kind_of

if TYPE_CHECKING:
    from .step import Worker

TOP = 40
STEPS = 5


def profiles(worker: Worker) -> dict[str, Any]:
    """The kernels of each way: by kind, and the longest with the ops that they fuse."""
    row: dict[str, Any] = {"model": worker.job["model"], "profile": {}}
    for name in worker.job["ways"]:
        with collect("code") as events:
            way = worker.build(name)
            for _ in range(6):
                way.call()
            worker.sync()
        facts = {k: f for e in events for k, f in e.data.get("kernels", {}).items()}
        start = time.perf_counter()
        for _ in range(STEPS):
            way.call()
        host = time.perf_counter() - start
        worker.sync()
        whole = time.perf_counter() - start
        kernels = kernel_times(way.call, worker.job["device"], STEPS)
        kinds: dict[str, list[float]] = {}
        for kernel in kernels:
            kernel["kind"] = kind_of(kernel["name"], facts)
            kernel["fuses"] = facts.get(kernel["name"], {}).get("note", "")
            found = kinds.setdefault(kernel["kind"], [0.0, 0.0])
            found[0] += kernel["ms"]
            found[1] += kernel["calls"]
            if kernel["name"] in facts:
                fact = facts[kernel["name"]]
                kernel["GB/s"] = fact["bytes"] * kernel["calls"] / max(kernel["ms"], 1e-9) / 1e6
        row["profile"][name] = {
            "kinds": kinds,
            "gpu ms": sum(ms for ms, _ in kinds.values()),
            "launches": sum(n for _, n in kinds.values()),
            "wall ms": whole / STEPS * 1e3,
            "host ms": host / STEPS * 1e3,
            "kernels": kernels,
        }
    return row


def table(row: dict[str, Any]) -> str:
    """A profile as text: kinds side by side, then the longest kernels."""
    ways = row["profile"]
    kinds = sorted({k for w in ways.values() for k in w["kinds"]})
    columns = ["kind", *(text for name in ways for text in (f"{name} ms", "launches"))]
    body = []
    for kind in kinds:
        found = [w["kinds"].get(kind, [0.0, 0.0]) for w in ways.values()]
        body.append([kind, *(text for ms, n in found for text in (f"{ms:.3f}", f"{n:.0f}"))])
    body.append(["all", *(t for w in ways.values() for t in (f"{w['gpu ms']:.3f}", f"{w['launches']:.0f}"))])
    body.append(
        ["wall, host", *(t for w in ways.values() for t in (f"{w['wall ms']:.3f}", f"{w['host ms']:.3f}"))]
    )
    texts = [f"{row['model']}, one step", render(body, columns)]
    for name, way in ways.items():
        lines = [
            [
                f"{k['ms']:.3f}",
                f"{k['calls']:.0f}",
                f"{k.get('GB/s', 0):.0f}",
                k["kind"],
                k["name"][:60],
                k["fuses"][:70],
            ]
            for k in way["kernels"][:TOP]
        ]
        texts += [name, render(lines, ["ms", "calls", "GB/s", "kind", "kernel", "fuses"])]
    return "\n".join(texts)
