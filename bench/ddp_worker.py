"""One rank of the data-parallel bench: `python -m bench.ddp_worker '{"rank": 0, ...}'`.

All modes train copies of one model in turns. Rank 0 prints a line of JSON as soon as it knows more: times of
each round (the slowest rank's), bucket time stamps, measured all-reduces, how much of the communication ran
beside computation. With a `deadline` (seconds since 1970) what no longer fits is left out, and first figures
of each mode are printed as it starts.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dynamotor.api import compile as compile_
from dynamotor.base.events import collect, counters
from dynamotor.step import compile_step

from . import models
from .ddp_overlap import MARKER, evidence, trace_events
from .step import Named
from .worker import AMP

OURS = ("ingraph", "split", "off")
LINK_SIZES = (512 << 10, 1 << 20, 2 << 20, 5 << 20, 10 << 20, 25 << 20)


def load(name: str, small: bool, batch: int | None) -> models.ModelCase:
    """A model of the bench's list, or "bert4": BERT-base's first four layers, or "mlp": six linear layers, to
    try things.
    """
    if name == "mlp":
        return _mlp(batch or 4)
    if name != "bert4":
        return models.load(name, small=small, batch=batch)
    case = models.load("BertForMaskedLM", small=small, batch=batch)
    encoder: Any = case.model.bert.encoder  # type: ignore[union-attr]
    encoder.layer = encoder.layer[:4]
    return case


def _mlp(batch: int) -> models.ModelCase:
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]

    def make_inputs(seed: int = 0, train: bool = False) -> models.Inputs:
        return (torch.randn(batch, 256, generator=torch.Generator().manual_seed(seed)),), {}

    return models.ModelCase(
        "mlp", torch.nn.Sequential(*layers), make_inputs, lambda out: out.square().mean(), "-"
    )


def compiler_of(mode: str) -> Callable[[Any], Any]:
    """A DDP module under a mode."""
    if mode == "eager":
        return lambda module: module
    if mode == "inductor":
        return torch.compile
    return lambda module: compile_(module, options={"ddp": mode})


class Rank:
    """This process: the model, its inputs, and one DDP module a mode."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.rank = job, job["rank"]
        self.cuda = job["device"] == "cuda"
        self.device = torch.device("cuda", self.rank) if self.cuda else torch.device("cpu")
        torch.manual_seed(0)
        self.case = load(job["model"], job["small"], job["batch"])
        self.model = self.case.model.train().to(self.device)
        args, kwargs = self.case.make_inputs(seed=self.rank, train=True)
        self.args = [a.to(self.device) for a in args]
        self.kwargs = {k: v.to(self.device) for k, v in kwargs.items()}
        self.amp = AMP.get(job["amp"])

    def wrap(self, mode: str, hook: Any = None) -> torch.nn.Module:
        """A fresh copy of the model under DDP, compiled as the mode says."""
        ddp = DistributedDataParallel(
            copy.deepcopy(self.model),
            device_ids=[self.rank] if self.cuda else None,
            bucket_cap_mb=self.job["bucket_mb"],
        )
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        return compiler_of(mode)(ddp)

    def training(self, mode: str) -> Callable[[], Any]:
        """Whole steps with AdamW: one program in mode "step", else the mode's backward and the eager update."""
        named = Named(copy.deepcopy(self.model), list(self.kwargs), len(self.args))
        ddp = DistributedDataParallel(
            named, device_ids=[self.rank] if self.cuda else None, bucket_cap_mb=self.job["bucket_mb"]
        )
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, foreach=True)
        batch = [*self.args, *self.kwargs.values()]
        whole = compile_step(ddp, self.case.loss, optimizer, n_inputs=len(batch)) if mode == "step" else None
        module = ddp if whole else compiler_of(mode)(ddp)

        def train() -> None:
            with self.autocast():
                loss = whole(*batch) if whole else self.case.loss(module(*batch))
            if whole:
                return
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return train

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def forward(self, module: torch.nn.Module) -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        with self.autocast():
            return self.case.loss(module(*self.args, **self.kwargs))

    def autocast(self) -> Any:
        """As the job asks for it."""
        return torch.autocast(self.device.type, dtype=self.amp) if self.amp else contextlib.nullcontext()

    def step(self, module: Any, sync: bool = True) -> tuple[float, float]:
        """Seconds of the forward and of the backward, from a common start of all ranks. A GPU is not waited
        for in between: all of its step counts as backward."""
        dist.barrier()
        began = time.perf_counter()
        if self.job["update"]:
            module()
            self.wait()
            return 0.0, time.perf_counter() - began
        with contextlib.nullcontext() if sync else module.no_sync():
            loss = self.forward(module)
            middle = began if self.cuda else time.perf_counter()
            loss.backward()
        self.wait()
        return middle - began, time.perf_counter() - middle

    def left(self) -> float:
        """Seconds until the deadline, as the first rank sees it."""
        if self.job.get("deadline") is None:
            return float("inf")
        found = [self.job["deadline"] - time.time()]
        dist.broadcast_object_list(found, src=0, device=self.device)
        return found[0]

    # Measurements -------------------------------------------------------------------------------------------
    def start(self, mode: str) -> tuple[Any, str]:
        """A compiled module, or what its first two steps raised on any rank."""
        module, text = None, ""
        try:
            module = self.training(mode) if self.job["update"] else self.wrap(mode)
            for _ in range(2):  # the first step makes the optimizer's state
                self.step(module)
        except Exception as error:  # the other modes are still worth measuring
            text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, text)
        text = next(filter(None, everybody), "")
        return (None if text else module), text

    def start_all(self, say: Callable[[dict[str, Any]], None]) -> dict[str, torch.nn.Module]:
        """Start one mode after the other, as long as the time that the slowest one took is left."""
        modules: dict[str, torch.nn.Module] = {}
        seconds: dict[str, float] = {}
        errors: dict[str, str] = {}
        for mode in self.job["modes"]:
            left = self.left()
            if left < max(seconds.values(), default=0.0):
                errors[mode] = f"not started: {left:.0f} s were left"
                continue
            began = time.perf_counter()
            module, text = self.start(mode)
            seconds[mode] = time.perf_counter() - began
            if module is None:
                errors[mode] = text
            else:
                modules[mode] = module
            say(
                {
                    "errors": errors,
                    "start_seconds": seconds,
                    "compiled": {**counters["ddp"], "step": counters["step"]["programs"]},
                    "fallback": dict(counters["fallback"]),
                }
            )
            if self.job.get("deadline") is not None and len(modules) > 1:
                say({"times": slowest(self.rounds(modules, 5))})
        return modules

    def rounds(self, modules: dict[str, torch.nn.Module], count: int) -> dict[str, dict[str, list[float]]]:
        """Seconds a step for each mode, in turns whose order changes from round to round; on a CPU also of a
        step without synchronisation. Stops early when a quarter of a minute is left."""
        modes = list(modules)
        times: dict[str, dict[str, list[float]]] = {
            mode: {"step": [], "alone": [], "forward": []} for mode in modes
        }
        for turn in range(-2, count):
            if turn > 3 and self.left() < 15.0:
                break
            for mode in (*modes[turn % len(modes) :], *modes[: turn % len(modes)]):
                step = sum(self.step(modules[mode]))
                once = self.cuda or self.job["update"]
                alone = (0.0, 0.0) if once else self.step(modules[mode], sync=False)
                if turn >= 0:
                    times[mode]["step"].append(step)
                    if not once:
                        times[mode]["alone"].append(sum(alone))
                        times[mode]["forward"].append(alone[0])
        return times

    def stamps(self, mode: str) -> list[dict[str, float]]:
        """When each bucket was ready and reduced, from the start of the backward; of the last of three
        steps.
        """
        seen: list[tuple[str, int, float]] = []

        def hook(state, bucket):  # DDP checks annotations, and these are texts here
            number = bucket.index()
            seen.append(("ready", number, time.perf_counter()))

            def done(future):
                seen.append(("done", number, time.perf_counter()))
                return future.value()[0]

            flat = bucket.buffer().div_(dist.get_world_size())
            return dist.all_reduce(flat, async_op=True).get_future().then(done)

        module = self.wrap(mode, None if mode == "ingraph" else hook)
        for _ in range(3):
            loss = self.forward(module)
            dist.barrier()
            seen.clear()
            with collect("bucket") as events:
                began = time.perf_counter()
                loss.backward()
                self.wait()
                ended = time.perf_counter()
        if mode == "ingraph":
            seen = [(e.data["what"], e.data["bucket"], e.time) for e in events]
        found: dict[int, dict[str, float]] = {}
        for what, number, at in seen:
            found.setdefault(number, {"backward": ended - began})[what] = at - began
        return [found[number] for number in sorted(found, key=lambda n: found[n].get("ready", 0.0))]

    def link(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of all-reduces of several sizes, each the best of five."""
        found = []
        for nbytes in LINK_SIZES:
            tensor = torch.ones(nbytes // 4, device=self.device)
            best = float("inf")
            for _ in range(5):
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(tensor)
                self.wait()
                best = min(best, time.perf_counter() - began)
            found.append((nbytes, best))
        return found

    def profile(self, module: torch.nn.Module) -> dict[str, Any]:
        """The second of two steps as the profiler sees it: what of the communication runs beside
        computation.
        """
        activity = torch.profiler.ProfilerActivity.CUDA if self.cuda else torch.profiler.ProfilerActivity.CPU
        self.step(module)
        dist.barrier()
        with torch.profiler.profile(activities=[activity]) as found:
            self.forward(module).backward()
            self.wait()
            getattr(torch.ones(1, device=self.device), MARKER)()
            self.forward(module).backward()
            self.wait()
        return evidence(trace_events(found))


def slowest(times: Any) -> Any:
    """The same structure with each number the largest of all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, times)
    return {
        mode: {key: [max(column) for column in zip(*(g[mode][key] for g in gathered))] for key in times[mode]}
        for mode in times
    }


def say(part: dict[str, Any]) -> None:
    """A line for whoever started the bench."""
    if dist.get_rank() == 0:
        print(json.dumps(part), flush=True)


def main() -> None:
    """Run the measurements of the job."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    cuda = job["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(job["rank"])
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=job["init"],
        rank=job["rank"],
        world_size=job["world"],
        timeout=timedelta(seconds=job["timeout"]),
        device_id=torch.device("cuda", job["rank"]) if cuda else None,
    )
    rank = Rank(job)
    say({"link": rank.link()})
    with collect("ddp") as events:
        modules = rank.start_all(say)
    plans = [e.data["plan"] for e in events if "plan" in e.data]
    say(
        {
            "times": slowest(rank.rounds(modules, job["rounds"])),
            "nbytes": [bucket.nbytes for bucket in plans[0].buckets] if plans else [],
        }
    )
    if job["profile"]:
        found: dict[str, Any] = {}
        for mode, module in modules.items():
            if rank.left() > 5.0:
                found[mode] = rank.profile(module)
                say({"profile": found})
    modes = [] if cuda or job["update"] else list(modules)  # the host's time stamps say nothing about a GPU
    modules.clear()
    say({"stamps": {mode: rank.stamps(mode) for mode in modes}})
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(
        0
    )  # all is said: threads of the backends that still run must not abort the process on its way out


if __name__ == "__main__":
    main()
