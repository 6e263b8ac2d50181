"""What goes wrong between ranks: each function gives the code of the error that a rank saw, or says what happened instead."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from ddp_cases import CAP, Normed, Plain, Unused, _data, here, loss_of
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamotor
from dynamotor import DynamotorError


def _compiled(model: Any = Plain, mode: str = "auto", **ddp: Any) -> Any:
    torch.manual_seed(0)
    dynamotor.reset()
    return dynamotor.compile(DDP(model().to(here()), **{"bucket_cap_mb": CAP, **ddp}), backend="aot_eager",
                             options={"ddp": mode})


def _train(module: Any, rank: int, steps: int = 3) -> str:
    try:
        for step in range(steps):
            loss_of(module(_data(rank, step, torch.float32))).backward()
    except DynamotorError as error:
        return error.code
    return "no error"


def other_plan(rank: int) -> str:
    """Bucket sizes differ."""
    return _train(_compiled(bucket_cap_mb=CAP * (1 + rank)), rank)


def without_gradient(rank: int) -> str:
    """A parameter that no loss sees, and DDP was not told."""
    return _train(_compiled(Unused), rank)


def without_gradient_later(rank: int) -> str:
    """All parameters are used at first, then one is not."""
    module = _compiled()
    first = _train(module, rank, steps=2)
    module.module.layers[-1].forward = lambda x: x
    return f"{first}, {_train(module, rank, steps=2)}"


def dies_in_backward(rank: int, mode: str = "auto") -> str:
    """Rank 1 is gone in the middle of its second backward."""
    module = _compiled(mode=mode)
    assert _train(module, rank, steps=1) == "no error"
    out = module(_data(rank, 1, torch.float32))
    if rank == 1:
        out.register_hook(lambda grad: os._exit(0))
    try:
        loss_of(out).backward()
    except DynamotorError as error:
        return error.code
    except RuntimeError:  # DDP's own reducer has waited: its error, which nothing of ours stands around
        return "RuntimeError"
    return "no error"


def dies_before_forward(rank: int) -> str:
    """Rank 1 is gone between two steps; DDP broadcasts buffers before a forward."""
    module = _compiled(Normed)
    assert _train(module, rank, steps=2) == "no error"
    dist.barrier()
    if rank == 1:
        os._exit(0)
    time.sleep(0.5)
    return _train(module, rank, steps=1)


def hangs_in_backward(rank: int, seconds: float) -> str:
    """Rank 1 stays in its second backward for longer than the group waits."""
    module = _compiled()
    assert _train(module, rank, steps=1) == "no error"
    out = module(_data(rank, 1, torch.float32))
    if rank == 1:
        time.sleep(seconds)
        return "slept"
    began = time.monotonic()
    try:
        loss_of(out).backward()
    except DynamotorError as error:
        return f"{error.code} after {time.monotonic() - began:.0f} s"
    return "no error"


def never_compiles(rank: int) -> str:
    """Rank 1 trains its DDP module uncompiled."""
    module = _compiled()
    if rank == 1:
        try:
            loss_of(module._orig_mod(_data(rank, 0, torch.float32))).backward()
        except RuntimeError:
            return "failed too"
        return "no error"
    return _train(module, rank, steps=1)


def disagree_on_the_way(rank: int) -> Any:
    """Rank 1 has a hook on a gradient, so neither reduces in its graph; both train."""
    torch.manual_seed(0)
    dynamotor.reset()
    module = DDP(Plain(), bucket_cap_mb=CAP)
    if rank == 1:
        module.module.layers[0].weight.register_hook(lambda grad: grad * 1.0)
    module = dynamotor.compile(module, backend="aot_eager")
    code = _train(module, rank)
    flat = torch.cat([p.grad.flatten() for p in module.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    return code, dict(dynamotor.counters["ddp"]), torch.equal(*both)
