"""One job of the GPU bench in a process of its own: `python -m bench.gpu_bench_worker '{"mode": "train",
...}'`.

It prints JSON lines: "ready" once libraries are imported and the model is built, then (when a line was sent
to it) rows, again whenever more is known, so that a job which is cut off leaves its rows.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.turns import turns
from dynamotor.base.config import config
from dynamotor.base.events import collect, counters, phase_seconds

from . import gpu_kernels, gpu_shapes
from .gpu_programs import PROGRAMS, Job, Workload, compiler, distance, profile
from .measure import quartiles


def say(**message: Any) -> None:
    """One line to the driver."""
    print(json.dumps(message, default=str), flush=True)


def sync(job: Job) -> None:
    if torch.device(job["device"]).type == "cuda":
        torch.cuda.synchronize()


class ModelJob:
    """The three programs of one model: `compile()`, then `time()`, `errors()`, `profiles()`, each adding to
    the row.
    """

    def __init__(self, job: Job, dropout: bool = True) -> None:
        self.job = job
        self.work = Workload(job, dropout)
        self.row: dict[str, Any] = {
            "mode": job["mode"],
            "model": job["model"],
            "batch": job["batch"],
            "optimizer": job.get("optimizer", ""),
            "cold_s": {},
            "peak_mb": {},
        }
        self.calls: dict[str, Any] = {}
        self.kernels: dict[str, Any] = {}

    def compile(self) -> None:
        """First calls (cold when the caches are), one program after the other; eager first, so that libraries
        are warm.
        """
        self.work.to_device()
        for program in PROGRAMS:
            before = self._start_peak()
            call = self.calls[program] = compiler(program, self.job)(self.work.model)
            with collect("code") as events:
                seconds = self._first(call)
            if program != "eager":
                self.row["cold_s"][program] = round(seconds, 3)
            if program == "ours":
                self.row["phases"] = {k: round(v, 3) for k, v in phase_seconds.items()}
                self.kernels = {
                    name: facts for e in events for name, facts in e.data.get("kernels", {}).items()
                }
            for _ in range(4):
                self.work.step(call)
            sync(self.job)
            self.row["peak_mb"][program] = self._peak(before)
        self.row |= {
            "graphs": counters["capture"]["graphs"],
            "breaks": sum(counters["breaks"].values()),
            "fallbacks": dict(counters["fallback"]),
            "cudagraphs": dict(counters["cudagraphs"]),
        }

    def _first(self, call: Any) -> float:
        sync(self.job)
        start = time.perf_counter()
        self.work.step(call)
        sync(self.job)
        return time.perf_counter() - start

    def _start_peak(self) -> int:
        if torch.device(self.job["device"]).type != "cuda":
            return 0
        self.work.model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _peak(self, before: int) -> float | None:
        """Megabytes more than before: activations, gradients and what the program keeps."""
        if torch.device(self.job["device"]).type != "cuda":
            return None
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)

    def time(self) -> None:
        """Steady state: wall clock of steps in turns."""
        programs = {name: (lambda call=call: self.work.step(call)) for name, call in self.calls.items()}
        rounds = turns(programs, seconds=self.job["seconds"], finish=lambda: sync(self.job))
        self.row["ms"] = {
            name: round(statistics.median(r[name] for r in rounds) * 1e3, 4) for name in programs
        }
        self.row["quartiles_ms"] = {
            name: [round(v * 1e3, 4) for v in quartiles([r[name] for r in rounds])] for name in programs
        }
        self.row["rounds"] = len(rounds)
        for key, (a, b) in {
            "speedup": ("eager", "ours"),
            "peer_speedup": ("eager", "peer"),
            "ratio": ("peer", "ours"),
        }.items():
            low, middle, high = quartiles([r[a] / r[b] for r in rounds])
            self.row[key], self.row[f"{key}_spread"] = round(middle, 4), [round(low, 4), round(high, 4)]

    def errors(self) -> None:
        """Each program against eager in float32."""
        wanted = self.work.reference()
        self.row["errors"] = {
            name: distance(self.work.results(call), wanted) for name, call in self.calls.items()
        }

    def profiles(self) -> None:
        """Where the GPU's time goes; our kernels with the ops that they fuse and the rate at which they move their
        bytes.
        """
        self.row["profile"] = {}
        for name, call in self.calls.items():
            found = profile(lambda: self.work.step(call), self.job["device"])  # noqa: B023
            for kernel in found["top"]:
                facts = self.kernels.get(kernel["name"]) if name == "ours" else None
                if facts:
                    rate = facts["bytes"] * kernel["calls"] / kernel["ms"] / 1e6
                    kernel |= {
                        "fuses": facts["note"],
                        "GB/s": round(rate),
                        "grid": facts["grid"],
                        "warps": facts["warps"],
                    }
            self.row["profile"][name] = found


def model_rows(job: Job) -> Callable[[], Iterator[dict[str, Any]]]:
    """Training or inference: compiled before it is ready unless first calls are to be measured cold and
    alone.
    """
    task = ModelJob(job)
    if not job["cold"]:
        task.compile()
        task.row["cold_s"] = {}

    def rows() -> Iterator[dict[str, Any]]:
        if job["cold"]:
            task.compile()
        yield task.row
        say(compiled=1)
        task.time()
        yield task.row
        if not task.work.has_dropout and not task.work.optimizer:
            task.errors()
            yield task.row
        if job.get("profile", True) and time.time() < job["deadline"] - 15:
            task.profiles()
            yield task.row

    return rows


def error_rows(job: Job) -> Callable[[], Iterator[dict[str, Any]]]:
    """A training step without dropout: errors alone."""
    task = ModelJob(job, dropout=False)

    def rows() -> Iterator[dict[str, Any]]:
        task.compile()
        task.errors()
        yield {key: task.row[key] for key in ("mode", "model", "batch", "errors", "fallbacks")}

    return rows


MODES: dict[str, Callable[[Job], Callable[[], Iterator[dict[str, Any]]]]] = {
    "train": model_rows,
    "infer": model_rows,
    "infer_amp": model_rows,
    "errors": error_rows,
    "kernels": gpu_kernels.kernel_rows,
    "overhead": gpu_kernels.overhead_rows,
    "products": gpu_kernels.product_rows,
    "shapes": gpu_shapes.shape_rows,
}


def main() -> int:
    """Run one job."""
    job = json.loads(sys.argv[1])
    torch.manual_seed(0)
    if job.get("target"):
        import bench.verification  # noqa: F401  (registers Triton's interpreter)
    try:
        with config.patch(strict=True):  # what fell back to eager has no figure
            rows = MODES[job["mode"]](job)
            say(ready=1)
            sys.stdin.readline()
            for row in rows():
                say(row=row)
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        say(error=f"{type(error).__name__}: {str(error)[:1500]}", trace=lines[-15:])
        return 1
    say(done=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
