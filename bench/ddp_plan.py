"""`python -m dynamotor ddp-plan MODEL`: the gradient buckets of a model and a simulated step of many ranks.

MODEL is a name of the bench's list, or a Python file that defines `model` and `inputs` (a tuple) and perhaps
`loss(output)`.

    python -m dynamotor ddp-plan BertForMaskedLM --world 64 --bandwidth 25 --latency 20
"""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.tool import run_tool
from dynamotor.api import compile as compile_
from dynamotor.base.errors import UsageError
from dynamotor.base.events import collect
from dynamotor.distributed.averager import averager_of
from dynamotor.distributed.plan import BucketPlan

from . import models
from .simulate import Link, Profile, SimulatedStep, simulate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("model", help="a model's name, or a Python file that defines `model` and `inputs`")
    parser.add_argument("--world", type=int, default=64, help="number of ranks")
    parser.add_argument("--bandwidth", type=float, default=25.0, help="Gbit/s between neighbours")
    parser.add_argument("--latency", type=float, default=20.0, help="µs a message")
    parser.add_argument(
        "--bucket-mb", type=float, default=None, help="DDP's bucket_cap_mb (default: DDP's own, 1 then 25)"
    )
    parser.add_argument(
        "--calibration", default=None, help="JSON of `bench --ddp`, for the link's efficiency and the error"
    )
    parser.add_argument("--small", action="store_true", help="reduced depth and size")
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--steps", type=int, default=5, help="steps timed here")


def _load(args: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    """The model and a function that runs it to its loss."""
    if args.model.endswith(".py"):
        if not Path(args.model).is_file():
            raise UsageError(
                "DM108", f"there is no program {args.model}", cure="give the path of a Python file"
            )
        space = runpy.run_path(args.model, run_name="ddp_plan")
        if missing := [name for name in ("model", "inputs") if name not in space]:
            raise UsageError(
                "DM710",
                f"{args.model} does not define {missing[0]!r}",
                cure="define `model` (a module), `inputs` (a tuple) and, if you like, `loss(output)`",
            )
        loss = space.get("loss", lambda output: output.square().mean())
        return space["model"], lambda module: loss(module(*space["inputs"]))
    case = models.load(args.model, small=args.small, batch=args.batch)
    case.model.train()
    positional, keywords = case.make_inputs(train=True)
    return case.model, lambda module: case.loss(module(*positional, **keywords))


def fake_group(world: int) -> None:
    """A process group of `world` ranks whose collectives do nothing; this process is rank 0."""
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=world)


def measure(
    ddp: torch.nn.Module, run: Callable[[torch.nn.Module], torch.Tensor], steps: int
) -> tuple[BucketPlan | None, Profile, str]:
    """Train a few steps here: the plan, the medians of the timings, and why there is no plan."""
    compiled = compile_(ddp)
    forward, backward, ready = [], [], []
    for _ in range(steps + 2):
        ddp.zero_grad()
        began = time.perf_counter()
        loss = run(compiled)
        middle = time.perf_counter()
        with collect("bucket") as events:
            loss.backward()
        forward.append(middle - began)
        backward.append(time.perf_counter() - middle)
        ready.append([e.time - middle for e in events if e.data["what"] == "ready"])
    averager = averager_of(ddp)
    plan = averager.plan
    reason = averager.reason.text if averager.reason else ""
    times = tuple(statistics.median(column) for column in zip(*ready[2:]))
    nbytes = tuple(bucket.nbytes for bucket in plan.buckets) if plan else ()
    return (
        plan,
        Profile(statistics.median(forward[2:]), statistics.median(backward[2:]), times, nbytes),
        reason,
    )


def link_of(args: argparse.Namespace) -> Link:
    """The link that was asked for, with the calibration of such links."""
    stated = Link(args.bandwidth * 1e9 / 8, args.latency * 1e-6)
    if args.calibration is None:
        return stated
    found = json.loads(Path(args.calibration).read_text()).get("link")
    if not found:
        raise UsageError(
            "DM711",
            f"{args.calibration} holds no calibration",
            cure="write one with `bench --ddp --json FILE`",
        )
    return Link(**found).at(stated.bandwidth, stated.latency)


def _row(name: str, step: SimulatedStep) -> str:
    return f"  {name:<32} {step.seconds * 1e3:9.2f} ms   exposed communication {step.exposed * 1e3:8.2f} ms"


def report(plan: BucketPlan, profile: Profile, link: Link, args: argparse.Namespace) -> str:
    """The text that the command prints."""
    inside, after = simulate(profile, link, args.world), simulate(profile.at_the_end(), link, args.world)
    error = (
        f"mean error {link.error:.0%} on measurements that the fit did not see"
        if link.error is not None
        else "not calibrated: the stated bandwidth and latency, a ring, no contention"
    )
    lines = [
        str(plan),
        "",
        f"simulated step on {args.world} ranks, {args.bandwidth:g} Gbit/s, {args.latency:g} µs ({error}):",
        f"  {'one rank alone (measured here)':<32} {(profile.forward + profile.backward) * 1e3:9.2f} ms",
        _row("all-reduces in the backward", inside),
        _row("all-reduces after the backward", after),
        "",
        "bucket       MB   ready ms   starts ms   done ms  (simulated, from the start of the backward)",
    ]
    for i, ((ready, start, end), nbytes) in enumerate(zip(inside.rows, profile.nbytes)):
        lines.append(f"{i:>6} {nbytes / 2**20:8.1f} {ready * 1e3:10.2f} {start * 1e3:11.2f} {end * 1e3:9.2f}")
    return "\n".join(lines)


def main(args: argparse.Namespace) -> int:
    """Print the plan and the simulation; 1 when DDP's own reducer would do the work."""
    link = link_of(args)
    model, run = _load(args)
    fake_group(args.world)
    try:
        ddp = DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)
        plan, profile, reason = measure(ddp, run, args.steps)
    finally:
        dist.destroy_process_group()
    if plan is None:
        print(f"no plan: DDP reduces the gradients itself, because {reason or 'nothing was captured'}")
        return 1
    print(report(plan, profile, link, args))
    return 0


if __name__ == "__main__":
    sys.exit(run_tool("ddp-plan", __doc__, add_arguments, main))
