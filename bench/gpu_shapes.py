"""The GPU bench's "shapes": BERT trains on batches of changing sizes; what each new one costs, and what
arguments cost a kernel.

ours: sizes become symbols with the second shape; literal: `dynamic=False`, each shape's kernels are built
for it; peer: torch.compile, which compiles for all sizes when it sees the second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.turns import turns
from dynamotor.api import compile as compile_
from dynamotor.base.events import collect

from .gpu_programs import BATCH, Job, Workload, compiler
from .measure import quartiles

MODEL = "BertForMaskedLM"
CUTS = ((0, 0), (8, 16), (3, 40), (16, 8), (5, 24))  # sequences and tokens taken off
TINY_CUTS = ((0, 0), (1, 2), (0, 4))
PEER_S = 70.0  # limit for a first call of torch.compile
Rows = Callable[[], Iterator[dict[str, Any]]]


def shape_rows(job: Job) -> Rows:
    """First calls and steady steps of each shape in turn; torch.compile's behind all others, as far as time
    allows.
    """
    work = Workload({**job, "mode": "train", "model": MODEL, "batch": BATCH[MODEL]})
    options = {"target": job["target"]} if job.get("target") else {}
    cuts = TINY_CUTS if job.get("tiny") else CUTS

    def rows() -> Iterator[dict[str, Any]]:
        work.to_device()
        finish = torch.cuda.synchronize if torch.device(job["device"]).type == "cuda" else lambda: None
        given, model = work.kwargs, work.model
        sizes = [list(_cut(next(iter(given.values())), *cut).shape) for cut in cuts]
        row: dict[str, Any] = {"mode": "shapes", "model": MODEL, "shapes": sizes, "of literal": []}
        row |= {"first_s": {}, "built": {}, "ms": {}}

        def first(name: str, call: Any) -> None:
            seconds, built = _first(work, call, finish)
            row["first_s"].setdefault(name, []).append(round(seconds, 3))
            row["built"].setdefault(name, []).append(built)
            work.step(call)

        calls = {"eager": model, "ours": compile_(model, options=options)}
        calls["literal"] = compile_(model, dynamic=False, options=options)
        for cut in cuts:
            work.kwargs = {k: _cut(v, *cut) for k, v in given.items()}
            for name, call in calls.items():
                first(name, call)
            steps = {name: (lambda call=call: work.step(call)) for name, call in calls.items()}
            rounds = turns(steps, seconds=job["seconds"] / 2, finish=finish)
            for name in calls:
                row["ms"].setdefault(name, []).append(
                    round(statistics.median(r[name] for r in rounds) * 1e3, 4)
                )
            row["of literal"].append(
                [round(q, 4) for q in quartiles([r["literal"] / r["ours"] for r in rounds])]
            )
            yield row
        peer = compiler("peer", job)(model)
        for cut in cuts:
            if time.time() > job["deadline"] - PEER_S:
                return
            work.kwargs = {k: _cut(v, *cut) for k, v in given.items()}
            first("peer", peer)
            yield row

    return rows


def _cut(x: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    return x[: len(x) - batch, : x.shape[1] - tokens].contiguous()


def _first(work: Workload, call: Any, finish: Callable[[], None]) -> tuple[float, int]:
    """Seconds of a step, and the kernels that were not there before it (ours)."""
    finish()
    start = time.perf_counter()
    with collect("build") as events:
        work.step(call)
    finish()
    return time.perf_counter() - start, len(events)
