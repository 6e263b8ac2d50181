"""`python -m dynamotor bench --step`: whole training steps (forward, loss, backward, AdamW) several ways, in
turns in one process.

eager: the eager loop. compiled: our compiled forward and backward, the optimizer in eager. torch.compile:
model and optimizer compiled by it. step: `compile_step`. On a GPU the compilers' default modes, and behind
"graphs" the same in mode "reduce-overhead", as the step's. The optimizer is AdamW, fused on a GPU and foreach
on a CPU. Each model has a process and caches of its own; a way's peak memory is what PyTorch's allocator
reserves for a step of it (recordings included) in another process, which runs it alone. "of peak"
is the rate of the model's matrix products and convolutions (PyTorch's count of them in forward and backward)
over that of one large product in the same types.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.tool import write_json
from bench.turns import geometric_mean, turns
from dynamotor.api import compile as compile_
from dynamotor.step import compile_step
from dynamotor.tools.tables import render

from . import models, step_check, step_profile
from .measure import quartiles
from .worker import AMP

MODELS = ("resnet18", "BertForMaskedLM", "mobilenetv3_large_100")
WAYS = ("eager", "compiled", "torch.compile", "step")
GRAPHS = ("compiled graphs", "torch.compile graphs")  # on a GPU, besides
TURN = {"cuda": 0.5, "cpu": 0.05}  # seconds of a turn: on a GPU the host's lead is lost at its end
COLUMNS = ("model", "way", "first s", "ms", "step is", "spread", "of peak", "peak MB", "loss")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench --step`."""
    parser.add_argument(
        "--step", action="store_true", help=f"whole training steps (--models: default {','.join(MODELS)})"
    )
    parser.add_argument(
        "--ways", default="", help=f"with --step: of {', '.join(WAYS + GRAPHS)} (default: all for the device)"
    )
    parser.add_argument(
        "--mode", default=None, help="with --step: mode of the step (default: reduce-overhead on a GPU)"
    )
    parser.add_argument("--check", action="store_true", help="with --step: compare with eager, not time")
    parser.add_argument("--profile", action="store_true", help="with --step: kernels of a GPU by kind")


@dataclass(frozen=True)
class Way:
    """A way of training: `call()` is one step, on a model and optimizer of its own."""

    call: Callable[[], torch.Tensor]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


# Instead of times: the work of a worker, and the text of its row.
TASKS = {
    "check": (step_check.check, step_check.table),
    "profile": (step_profile.profiles, step_profile.table),
}


class Named(torch.nn.Module):
    """A model that takes its inputs in a row, some of them by these names."""

    def __init__(self, model: torch.nn.Module, names: list[str], positional: int) -> None:
        super().__init__()
        self.model, self.names, self.positional = model, names, positional

    def forward(self, *batch: torch.Tensor) -> Any:
        return self.model(*batch[: self.positional], **dict(zip(self.names, batch[self.positional :])))


class Worker:
    """One model's ways: `build(way)` makes one of them."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.device = job, torch.device(job["device"])
        self.case = models.load(job["model"], small=job["small"], batch=job["batch"])
        self.cuda = self.device.type == "cuda"
        self.sync: Callable[[], object] = torch.cuda.synchronize if self.cuda else (lambda: None)
        args, kwargs = self.case.make_inputs(train=True)
        self.batch = [t.to(self.device) for t in (*args, *kwargs.values())]
        self.names, self.positional = list(kwargs), len(args)
        self.mode = job["mode"] or ("reduce-overhead" if self.cuda else None)
        self.amp = AMP.get(job["amp"])

    def build(self, way: str, amp: bool = True) -> Way:
        """A way with its own copy of the model and optimizer. amp: under autocast where the job asks for it."""
        dtype = self.amp if amp else None

        def autocast() -> contextlib.AbstractContextManager[Any]:
            return torch.autocast(self.device.type, dtype=dtype) if dtype else contextlib.nullcontext()

        model = Named(copy.deepcopy(self.case.model), self.names, self.positional).to(self.device).train()
        kind = {"fused": True} if self.cuda else {"foreach": True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)
        loss_fn, batch = self.case.loss, self.batch
        if way == "step":
            whole = compile_step(model, loss_fn, optimizer, n_inputs=len(batch), mode=self.mode)

            def step() -> torch.Tensor:
                with autocast():
                    return whole(*batch)

            return Way(step, model, optimizer)
        forward: Callable[..., torch.Tensor] = lambda *b: loss_fn(model(*b))  # noqa: E731
        update: Callable[[], Any] = optimizer.step
        mode = self.mode if way in GRAPHS else None
        if way.startswith("compiled"):
            forward = compile_(forward, mode=mode)
        elif way.startswith("torch.compile"):
            forward, update = torch.compile(forward, mode=mode), torch.compile(optimizer.step)

        def train() -> torch.Tensor:
            with autocast():
                loss = forward(*batch)
            loss.backward()
            update()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return Way(train, model, optimizer)

    def run(self) -> None:
        """Build and warm each way, measure all in turns; a line of JSON after each."""
        row: dict[str, Any] = {"model": self.job["model"], "ways": {}}
        calls: dict[str, Callable[[], torch.Tensor]] = {}
        for way in self.job["ways"]:
            start = time.perf_counter()
            try:
                call = self.build(way).call
                for _ in range(2):  # the first step makes the optimizer's state
                    call()
                self.sync()
                first = time.perf_counter() - start
                for _ in range(4):  # CUDA graphs are recorded after some calls
                    loss = call()
                self.sync()
            except Exception as error:  # a way that cannot run this model is a row of the table
                row["ways"][way] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
                continue
            row["ways"][way] = {"first_s": first, "loss": float(loss)}
            calls[way] = call
            print(json.dumps(row), flush=True)
        rounds = turns(
            calls, seconds=self.job["seconds"], finish=self.sync, turn=TURN[self.device.type], least=3
        )
        row["flop"], row["peak_flop_s"] = self._flop(), self._peak()
        for way in calls:
            times = [r[way] for r in rounds]
            row["ways"][way]["ms"] = statistics.median(times) * 1e3
            row["ways"][way]["of_peak"] = row["flop"] / row["peak_flop_s"] / statistics.median(times)
            if "step" in calls:
                row["ways"][way]["over_step"] = quartiles([r[way] / r["step"] for r in rounds])
        print(json.dumps(row), flush=True)

    def _flop(self) -> int:
        """Floating-point operations of one step's products, convolutions and attention."""
        counter = FlopCounterMode(display=False)
        way = self.build("eager")
        with counter:
            way.call()
        return counter.get_total_flops()

    def _peak(self) -> float:
        """Operations a second of a large product in the types of the step."""
        n = 8192 if self.cuda else 2048
        a = torch.randn(n, n, device=self.device, dtype=self.amp or torch.float32)
        times = []
        for _ in range(8):
            start = time.perf_counter()
            a @ a
            self.sync()
            times.append(time.perf_counter() - start)
        return 2 * n**3 / min(times[2:])

    def memory(self) -> dict[str, float]:
        """Megabytes of the one way of the job at the peak of a step that is warm: what PyTorch's allocator has
        reserved, and what of it is allocated (a recording's own memory counts as a whole).
        """
        call = self.build(self.job["ways"][0]).call
        for _ in range(7):  # the first makes the optimizer's state; CUDA graphs are recorded after some
            call()
        gc.collect()
        self.sync()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.sync()
        found = {"peak_mb": torch.cuda.max_memory_reserved, "allocated_mb": torch.cuda.max_memory_allocated}
        return {name: nbytes() / 2**20 for name, nbytes in found.items()}


def measure(job: dict[str, Any], timeout: float) -> dict[str, Any]:
    """One model in a process of its own, and on a GPU each way's memory in others."""
    cache = tempfile.mkdtemp(prefix="dynamotor-bench-")
    env = dict(
        os.environ,
        DYNAMOTOR_CACHE_DIR=f"{cache}/dynamotor",
        TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor",
        TRITON_CACHE_DIR=f"{cache}/triton",
    )
    try:
        row = {"model": job["model"], "ways": {}, **_worker(job, env, timeout)}
        if job["device"] == "cuda" and job["task"] == "time":
            for way, found in row["ways"].items():
                of_way = {**job, "ways": [way], "task": "memory"}
                found |= {k: v for k, v in _worker(of_way, env, timeout).items() if k != "notes"}
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return row


def _worker(job: dict[str, Any], env: dict[str, str], timeout: float) -> dict[str, Any]:
    """The last line that a process printed, also when its time was up."""
    command, error = [sys.executable, "-m", "bench.step", json.dumps(job)], ""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
        out = done.stdout
        error = (
            ""
            if done.returncode == 0
            else (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        )
        notes = [line for line in done.stderr.splitlines() if line.startswith("dynamotor:")]
    except subprocess.TimeoutExpired as late:
        out = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        error, notes = f"no end within {timeout:.0f} s", []
    lines = [line for line in out.splitlines() if line.startswith("{")]
    row = json.loads(lines[-1]) if lines else {}
    return {**row, "notes": notes, **({"error": error} if error else {})}


def table(row: dict[str, Any]) -> list[list[str]]:
    """The printed rows of one model."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    found = []
    for way, w in row["ways"].items():
        low, mid, high = w.get("over_step") or (None, None, None)
        found.append(
            [
                row["model"],
                way,
                number(w.get("first_s"), ".1f"),
                number(w.get("ms"), ".2f"),
                w.get("error") or f"{number(mid, '.3f')}x as fast",
                f"{number(low, '.2f')}-{number(high, '.2f')}",
                number(w.get("of_peak"), ".2f"),
                number(w.get("peak_mb"), ".0f"),
                number(w.get("loss"), ".4f"),
            ]
        )
    return found


def main(args: argparse.Namespace) -> int:
    """Run the bench; 0 when every way of every model ran."""
    names = MODELS if args.models == "twelve" else [name for name in args.models.split(",") if name]
    ways = args.ways.split(",") if args.ways else [*WAYS, *(GRAPHS if args.device == "cuda" else ())]
    task = next((task for task in TASKS if getattr(args, task)), "time")
    rows = []
    for name in names:
        job = {
            "model": name,
            "device": args.device,
            "amp": args.amp,
            "batch": args.batch,
            "small": args.small,
            "mode": args.mode,
            "seconds": args.seconds,
            "ways": ways,
            "task": task,
        }
        rows.append(measure(job, args.timeout))
        show = TASKS[task][1] if task in TASKS else lambda row: render(table(row), COLUMNS)
        print(name if task in TASKS and "error" in rows[-1] else show(rows[-1]))
        print("\n".join([*rows[-1]["notes"], rows[-1].get("error", "")]).strip(), flush=True)
    means = {}
    for way in () if task in TASKS else ways:
        known = [r["ways"][way] for r in rows if "over_step" in r["ways"].get(way, {})]
        if known and way != "step":
            means[way] = geometric_mean([w["over_step"][1] for w in known])
            print(
                f"{way:>14}: the whole step is {means[way]:.3f} times as fast (geometric mean of {len(known)})"
            )
    result = {
        "command": " ".join(sys.argv[1:]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "rows": rows,
        "step_is_faster_by": means,
    }
    write_json(args.json, result)
    failed = [w for r in rows for w in [r, *r.get("ways", {}).values()] if "error" in w or w.get("wrong")]
    return 1 if failed else 0


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    worker = Worker(given)
    if given["task"] == "memory":
        print(json.dumps(worker.memory()), flush=True)
    elif given["task"] in TASKS:
        print(json.dumps(TASKS[given["task"]][0](worker)), flush=True)
    else:
        worker.run()
