"""`python -m bench auto`: backend="auto" beside each single backend, on small models of the list.

Steps run in turns and are timed in seconds of this process's processors, which other programs on the machine
disturb least; the figure of a row is the best single backend's median over auto's (1: as quick, 0.98: the
bar).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import dynamotor
from bench.tool import write_json
from dynamotor.base.events import collect
from dynamotor.tools.tables import render

from .worker import PhaseOfModel

MODELS = "resnet18,mobilenetv3_large_100,vit_base_patch16_224,BertForMaskedLM,GPT2LMHeadModel"
COLUMNS = ("model", "phase", "chosen", "eager ms", "native ms", "auto ms", "best / auto")


def measure(name: str, phase: str, rounds: int) -> dict[str, Any]:
    """One row: medians of process time, in turns."""
    job = {"model": name, "phase": phase, "device": "cpu", "amp": None, "batch": None, "small": True}
    program = PhaseOfModel(job, dropout=False)
    plain = program.model
    steps: dict[str, Callable[[], Any]] = {}
    with collect("auto") as events:
        for backend in ("eager", "native", "auto"):
            program.model = copy.deepcopy(plain)
            options = {"auto_backends": "eager,native"} if backend == "auto" else {}
            steps[backend] = _step(program, program.model, backend, options)
            for _ in range(3):
                steps[backend]()
    samples: dict[str, list[float]] = {backend: [] for backend in steps}
    for k in range(rounds):
        for backend in list(steps)[:: 1 if k % 2 else -1]:
            begin = time.process_time()
            steps[backend]()
            samples[backend].append(1e3 * (time.process_time() - begin))
    ms = {f"{backend} ms": statistics.median(taken) for backend, taken in samples.items()}
    chosen = ", ".join(event.data["chosen"] for event in events) or "native (not measured)"
    best = min(ms["eager ms"], ms["native ms"])
    return {"model": name, "phase": phase, "chosen": chosen, **ms, "best / auto": best / ms["auto ms"]}


def _step(program: PhaseOfModel, model: Any, backend: str, options: dict[str, Any]) -> Callable[[], Any]:
    compiled = model if backend == "eager" else dynamotor.compile(model, backend=backend, options=options)

    def step() -> Any:
        program.model = model
        return program.step(compiled)

    return step


def main() -> int:
    """Measure, print a table, write JSON; 1 when auto is below 0.98 of the best."""
    parser = argparse.ArgumentParser(prog="python -m bench auto", description=__doc__)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--phase", default="infer,train")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in args.models.split(","):
        for phase in args.phase.split(","):
            rows.append(measure(name, phase, args.rounds))
            dynamotor.reset()
            print(rows[-1], flush=True)
    print(
        render(
            [[f"{v:.3f}" if isinstance(v, float) else v for v in map(row.get, COLUMNS)] for row in rows],
            COLUMNS,
        )
    )
    write_json(args.json, rows)
    return int(min(row["best / auto"] for row in rows) < 0.98)


if __name__ == "__main__":
    sys.exit(main())
