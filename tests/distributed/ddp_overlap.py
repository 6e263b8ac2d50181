"""When gradient buckets become ready in a backward pass: the pilot of ten linear layers, buckets of 5 MB."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from ddp_cases import Plain
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamotor
from dynamotor.base.events import collect

WIDTH, LAYERS, BUCKET_MB = 640, 10, 3.5


class Pilot(Plain):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))


def _hooked(module: DDP, stamps: list[float]) -> None:
    def hook(state, bucket):
        stamps.append(time.perf_counter())
        flat = bucket.buffer().div_(2)
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda f: f.value()[0])

    module.register_comm_hook(None, hook)


def fractions(rank: int, mode: str, tries: int = 6) -> dict[str, Any]:
    """For each backward, the time at which the first bucket is ready over that of the last. Mode "eager" is
    eager DDP.
    """
    torch.manual_seed(0)
    dynamotor.reset()
    module = DDP(Pilot(), bucket_cap_mb=BUCKET_MB)
    stamps: list[float] = []
    if mode != "ingraph":
        _hooked(module, stamps)
    f = module if mode == "eager" else dynamotor.compile(module, options={"ddp": mode})
    x = torch.randn(WIDTH, WIDTH)
    found = []
    with collect("code") as programs:
        for _ in range(tries + 2):
            module.zero_grad()
            out = f(x)
            dist.barrier()
            stamps.clear()
            with collect("bucket") as events:
                began = time.perf_counter()
                out.square().mean().backward()
            ready = stamps or [e.time for e in events if e.data["what"] == "ready"]
            found.append((ready[0] - began) / (ready[-1] - began))
    position = _position([e.data["python"] for e in programs]) if mode == "ingraph" else None
    return {
        "fractions": found[2:],
        "position": position,
        "modes": dict(dynamotor.counters["ddp"]),
        "buckets": len(ready),
    }


def _position(texts: list[str]) -> float:
    """Where in the backward program the first bucket starts, counted in matrix products, over where the last
    one does.
    """
    lines = next(text for text in texts if "bucket_start" in text).splitlines()
    products = [
        sum("mm(" in line for line in lines[:i]) for i, line in enumerate(lines) if "bucket_start" in line
    ]
    return products[0] / products[-1]
