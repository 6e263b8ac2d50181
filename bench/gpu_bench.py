"""The GPU bench: whole models, kernels and host cost, each beside eager and torch.compile, with the bars that
they must pass.

python -m bench.gpu_bench --modes train,infer --models resnet50,GPT2LMHeadModel --budget 480 --json out.json

JSON is written after each row. Several short runs give one file: `--merge EARLIER.json` (repeatable) starts
from earlier measurements, and `--modes ""` only merges and reports. docs/gpu.md has the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.tool import write_json

from . import gpu_bars
from .gpu_programs import BATCH, WITH_DROPOUT, Job
from .json_worker import JsonWorker

WITHOUT_MODEL = ("kernels", "overhead", "products", "shapes")
GUESS = {
    "train": 75.0,
    "infer": 55.0,
    "infer_amp": 55.0,
    "errors": 75.0,
    "kernels": 90.0,
    "overhead": 45.0,
    "products": 25.0,
    "shapes": 35.0,
}  # seconds a job


class Worker(JsonWorker):
    """A process with one job, on caches of its own."""

    def __init__(self, job: Job) -> None:
        self.job, self.is_ready = job, False
        self.first: dict[str, Any] | None = {}
        self.folder = tempfile.mkdtemp(prefix="dynamotor-gpu-")
        env = dict(
            os.environ,
            DYNAMOTOR_CACHE_DIR=f"{self.folder}/dynamotor",
            TORCHINDUCTOR_CACHE_DIR=f"{self.folder}/inductor",
            TRITON_CACHE_DIR=f"{self.folder}/triton",
            HF_HUB_OFFLINE="1",
        )
        super().__init__(
            [sys.executable, "-X", "faulthandler", "-m", "bench.gpu_bench_worker", json.dumps(job)], env
        )

    def wait_ready(self, deadline: float) -> None:
        """Until its libraries are imported and its model is built (and compiled, when first calls are not
        measured).
        """
        if not self.is_ready:
            self.first = self.next(deadline)
            self.is_ready = True

    def message(self, deadline: float) -> dict[str, Any] | None:
        """Its next line; the first says that it is ready."""
        self.wait_ready(deadline)
        first, self.first = self.first, {}
        return first if first != {} else self.next(deadline)

    def end(self, patience: float = 5.0) -> str:
        """Stop the process and remove its caches."""
        tail = super().end(patience)
        shutil.rmtree(self.folder, ignore_errors=True)
        return tail


class Session:
    """One run: jobs in order, the report after each row."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.monotonic()
        self.deadline = self.began + args.budget
        self.report: dict[str, Any] = {"rows": {}, "not run": []}
        for path in args.merge:
            if Path(path).exists():
                earlier = json.loads(Path(path).read_text())
                rows = {
                    key: row
                    for key, row in earlier["rows"].items()
                    if "error" not in row or key not in self.report["rows"]
                }
                self.report |= {"rows": {**self.report["rows"], **rows}, "device": earlier["device"]}
        self.device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        self.spent: dict[str, float] = {}

    def jobs(self) -> list[Job]:
        """The measurements to make, in order."""
        a = self.args
        common = {
            "device": a.device,
            "tiny": a.tiny,
            "seconds": a.seconds,
            "peer": a.peer,
            "target": a.target,
            "optimizer": a.optimizer,
            "profile": not a.no_profile,
            "cold": not a.no_cold,
            "deadline": time.time() + a.budget,
        }
        found = []
        for mode in filter(None, a.modes.split(",")):
            every = WITH_DROPOUT if mode == "errors" else list(BATCH)
            names = [""] if mode in WITHOUT_MODEL else every if a.models == "all" else a.models.split(",")
            group = (
                "errors" if mode == "errors" else "models" if a.no_cold and mode not in WITHOUT_MODEL else ""
            )
            found += [
                {**common, "mode": mode, "model": name, "batch": BATCH.get(name, 32), "group": group}
                for name in names
            ]
        if a.kernels:
            found = [
                {**job, "only": a.kernels.split(",")} if job["mode"] == "kernels" else job for job in found
            ]
        return found

    def run(self) -> int:
        """Measure; 0 when every row came."""
        waiting, ready = self.jobs(), list[Worker]()
        while waiting or ready:
            ready = ready or self._start(waiting)
            for worker in ready:  # no worker compiles while another is timed
                if worker.job["group"] == "models":
                    worker.wait_ready(self.deadline)
            if ready:
                worker = ready.pop(0)
                alone = not ready and bool(waiting) and not waiting[0]["group"]
                ready += self._measure(worker, waiting if alone else [])
        self.write()
        print(gpu_bars.markdown(self.report["rows"]) if self.args.markdown else gpu_bars.text(self.report))
        return int(
            bool(self.report["not run"]) or any("error" in row for row in self.report["rows"].values())
        )

    def _start(self, waiting: list[Job]) -> list[Worker]:
        """Workers for the next job, or the next few that go side by side, as far as time allows."""
        while waiting and self._left() < self._guess(waiting[0]):
            job = waiting.pop(0)
            self.report["not run"].append(f"{job['mode']}/{job['model']}")
        group = waiting[0]["group"] if waiting else ""
        started: list[Worker] = []
        while waiting and waiting[0]["group"] == group and len(started) < (self.args.side if group else 1):
            started.append(Worker(waiting.pop(0)))
            if group == "errors":  # nothing is timed: no need to wait for each other
                started[-1].send("go")
        return started

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _guess(self, job: Job) -> float:
        """Seconds that a job will take: as long as the longest of its mode so far."""
        guess = 1.0 if self.args.tiny else GUESS[job["mode"]]
        return self.spent.get(job["mode"], guess if job["cold"] else guess / 2)

    def _measure(self, worker: Worker, waiting: list[Job]) -> list[Worker]:
        """One worker to its end; once it has compiled, the next one imports and builds its model
        meanwhile.
        """
        job, preloaded, last = worker.job, [], {"mode": worker.job["mode"], "model": worker.job["model"]}
        failure: dict[str, Any] | None = None
        started = time.monotonic()
        while True:
            message = worker.message(self.deadline)
            if message is None or "done" in message:
                break
            if "ready" in message:
                started = time.monotonic()
                worker.send("go")
            elif "compiled" in message and waiting and not preloaded:
                preloaded = self._start(waiting)
            elif "row" in message:
                last = message["row"]
                self._add(last)
            elif "error" in message:
                failure = message
        tail = worker.end(5.0 if message is not None else 0.0)
        if failure is None and message is None:
            failure = {"error": "out of time" if self._left() <= 0 else f"the worker died: {tail}"}
        if failure:
            self._fail({**last, **failure})
        else:
            self.spent[job["mode"]] = max(self.spent.get(job["mode"], 0.0), time.monotonic() - started)
        return preloaded

    def _fail(self, row: dict[str, Any]) -> None:
        """A row that broke off does not take the place of a whole one from an earlier run."""
        key = f"{row['mode']}/{row['model']}"
        if "ratio" not in row and "ratio" in self.report["rows"].get(key, {}):
            self.report["not run"].append(f"{key}: {row['error']}")
            print(gpu_bars.line(key, row), flush=True)
        else:
            self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        key = f"{row['mode']}/{row['model']}"
        self.report["rows"][key] = {
            **row,
            "device": self.device,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        self.write()
        print(gpu_bars.line(key, row), flush=True)

    def write(self) -> None:
        """The report with its bars, as JSON."""
        self.report |= {
            "summary": gpu_bars.summary(self.report["rows"]),
            "device": self.device if self.args.modes else self.report.get("device", ""),
            "command": " ".join(sys.argv[1:]),
        }
        write_json(self.args.json, self.report)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_bench", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--modes",
        default="train,infer,errors,kernels,overhead",
        help="also infer_amp, products, shapes; '' only reports",
    )
    parser.add_argument("--models", default="all", help=f"of {', '.join(BATCH)}")
    parser.add_argument("--kernels", default="", help="only kernels whose names start so")
    parser.add_argument(
        "--budget",
        type=float,
        default=540.0,
        help="seconds after which nothing new is started; late jobs end",
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="steady state of each model")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--merge", action="append", default=[], help="an earlier report to start from")
    parser.add_argument(
        "--no-cold", action="store_true", help="no cold figures: models compile side by side, then are timed"
    )
    parser.add_argument("--side", type=int, default=4, help="processes that compile side by side")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument(
        "--optimizer", default="", choices=("", "sgd", "adamw", "adamw-fused"), help="inside the step"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="reduced models")
    parser.add_argument("--peer", default="inductor", help="the backend of torch.compile to compare with")
    parser.add_argument(
        "--target", default="", help="config.target: 'triton' runs kernels in the interpreter on a CPU"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="end with the README's table instead of the report"
    )
    return parser


def main() -> int:
    """Run the bench."""
    args = arguments().parse_args()
    if args.device == "cuda" and args.modes and not torch.cuda.is_available():
        print("no GPU in this machine: nothing is measured (--device cpu --tiny tries the bench itself)")
        return 0
    if not torch.cuda.is_available() and args.device == "cuda":
        args.device = "none"
    return Session(args).run()


if __name__ == "__main__":
    raise SystemExit(main())
