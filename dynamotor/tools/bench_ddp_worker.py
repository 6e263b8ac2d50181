"""One rank of the data-parallel bench: `python -m dynamotor.tools.bench_ddp_worker '{"rank": 0, ...}'`.

All modes train copies of one model in turns. The last line that rank 0 prints is JSON: times of each round (the slowest rank's),
bucket time stamps, measured all-reduces and, on CUDA, how much of the communication ran beside other kernels.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..api import compile as compile_
from ..base.events import collect, counters
from . import models
from .bench_worker import AMP

OURS = ("ingraph", "split", "off")
LINK_SIZES = (512 << 10, 1 << 20, 2 << 20, 5 << 20, 10 << 20, 25 << 20)


def load(name: str, small: bool, batch: int | None) -> models.ModelCase:
    """A model of the bench's list, or "bert4": BERT-base's first four layers."""
    if name != "bert4":
        return models.load(name, small=small, batch=batch)
    case = models.load("BertForMaskedLM", small=small, batch=batch)
    encoder: Any = case.model.bert.encoder  # type: ignore[union-attr]
    encoder.layer = encoder.layer[:4]
    return case


def compiler_of(mode: str) -> Callable[[Any], Any]:
    """What a mode makes of a DDP module."""
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
        if self.cuda:
            torch.cuda.set_device(self.device)
        torch.manual_seed(0)
        self.case = load(job["model"], job["small"], job["batch"])
        self.model = self.case.model.train().to(self.device)
        args, kwargs = self.case.make_inputs(seed=self.rank, train=True)
        self.args = [a.to(self.device) for a in args]
        self.kwargs = {k: v.to(self.device) for k, v in kwargs.items()}
        self.amp = AMP.get(job["amp"])

    def wrap(self, mode: str, hook: Any = None) -> torch.nn.Module:
        """A fresh copy of the model under DDP, compiled as the mode says."""
        ddp = DistributedDataParallel(copy.deepcopy(self.model), device_ids=[self.rank] if self.cuda else None,
                                      bucket_cap_mb=self.job["bucket_mb"])
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        return compiler_of(mode)(ddp)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def forward(self, module: torch.nn.Module) -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, dtype=self.amp) if self.amp else contextlib.nullcontext():
            return self.case.loss(module(*self.args, **self.kwargs))

    def step(self, module: Any, sync: bool = True) -> tuple[float, float]:
        """Seconds of the forward and of the backward, from a common start of all ranks."""
        dist.barrier()
        began = time.perf_counter()
        with contextlib.nullcontext() if sync else module.no_sync():
            loss = self.forward(module)
            self.wait()
            middle = time.perf_counter()
            loss.backward()
        self.wait()
        return middle - began, time.perf_counter() - middle

    # Measurements ----------------------------------------------------------------------------------------------------------
    def start(self, modes: Sequence[str]) -> tuple[dict[str, torch.nn.Module], dict[str, str]]:
        """A compiled module for each mode, and what was raised by those whose first step fails on any rank."""
        modules, errors = {mode: self.wrap(mode) for mode in modes}, {}
        for mode in modes:
            try:
                self.step(modules[mode])
            except Exception as error:  # the other modes are still worth measuring
                errors[mode] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, errors)
            errors = {name: text for each in everybody for name, text in each.items()}
        return {mode: module for mode, module in modules.items() if mode not in errors}, errors

    def rounds(self, modules: dict[str, torch.nn.Module]) -> dict[str, dict[str, list[float]]]:
        """Seconds a step for each mode, with and without synchronisation, in turns whose order changes from round to round."""
        modes = list(modules)
        times: dict[str, dict[str, list[float]]] = {mode: {"step": [], "alone": [], "forward": []} for mode in modes}
        for warm_up in (True, False):
            for turn in range(2 if warm_up else self.job["rounds"]):
                for mode in (*modes[turn % len(modes):], *modes[:turn % len(modes)]):
                    forward, backward = self.step(modules[mode])
                    alone = self.step(modules[mode], sync=False)
                    if not warm_up:
                        times[mode]["step"].append(forward + backward)
                        times[mode]["alone"].append(sum(alone))
                        times[mode]["forward"].append(alone[0])
        return times

    def stamps(self, mode: str) -> list[dict[str, float]]:
        """When each bucket was ready and reduced, from the start of the backward; of the last of three steps."""
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

    def plan_bytes(self, mode: str) -> list[int]:
        """Bytes of each bucket of our plan."""
        if mode != "ingraph":
            return []
        module = self.wrap(mode)
        with collect("ddp") as events:
            self.forward(module).backward()
        return [bucket.nbytes for e in events if "plan" in e.data for bucket in e.data["plan"].buckets]

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

    def profile(self, mode: str) -> dict[str, float]:
        """On CUDA: milliseconds of collectives and of other kernels in one step, and of both at once."""
        module = self.wrap(mode)
        for _ in range(3):
            self.step(module)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            self.step(module)
        spans = [(e.name, e.time_range.start, e.time_range.end) for e in found.events()
                 if e.device_type == torch.autograd.DeviceType.CUDA]
        return overlap_of(spans)


def overlap_of(spans: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Of kernels (name, start, end in µs): milliseconds of collectives, of other kernels, and of both at once."""
    collective = merged([(a, b) for name, a, b in spans if "nccl" in name.lower()])
    other = merged([(a, b) for name, a, b in spans if "nccl" not in name.lower()])
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in collective for c, d in other)
    return {"collectives_ms": sum(b - a for a, b in collective) / 1e3, "kernels_ms": sum(b - a for a, b in other) / 1e3,
            "both_ms": both / 1e3}


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals without overlaps."""
    result: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if result and a <= result[-1][1]:
            result[-1] = result[-1][0], max(b, result[-1][1])
        else:
            result.append((a, b))
    return result


def slowest(times: Any) -> Any:
    """The same structure with each number the largest of all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, times)
    return {mode: {key: [max(column) for column in zip(*(g[mode][key] for g in gathered))] for key in times[mode]}
            for mode in times}


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    dist.init_process_group("nccl" if job["device"] == "cuda" else "gloo", init_method=job["init"], rank=job["rank"],
                            world_size=job["world"], timeout=timedelta(seconds=job["timeout"]))
    rank = Rank(job)
    result: dict[str, Any] = {"link": rank.link()}
    modules, result["errors"] = rank.start(job["modes"])
    result["times"] = slowest(rank.rounds(modules))
    result |= {"compiled": dict(counters["ddp"]), "fallback": dict(counters["fallback"])}
    modes = list(modules)
    modules.clear()
    result["stamps"] = {mode: rank.stamps(mode) for mode in modes}
    result["nbytes"] = next((rank.plan_bytes(mode) for mode in modes if mode == "ingraph"), [])
    if job["device"] == "cuda":
        result["profile"] = {mode: rank.profile(mode) for mode in modes}
    dist.barrier()
    if rank.rank == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
