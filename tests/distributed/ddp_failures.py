"""What goes wrong between ranks: each function gives the code of the error that a rank saw, or says what
happened instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
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
    return dynamotor.compile(
        DDP(model().to(here()), **{"bucket_cap_mb": CAP, **ddp}), backend="aot_eager", options={"ddp": mode}
    )


def _train(module: Any, rank: int, steps: int = 3) -> str:
    try:
        for step in range(steps):
            loss_of(module(_data(rank, step, torch.float32))).backward()
    except DynamotorError as error:
        return code_of(error)
    return "no error"


VARIANTS: dict[str, dict[str, Any]] = {
    "in the graph": {},
    "split": {"mode": "split"},
    "off": {"mode": "off"},
    "in the graph, bucket view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "off, bucket view": {"mode": "off", "gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
}


def code_of(error: DynamotorError) -> str:
    """The code, and whether the error says why, what to do and where: the line of this file that was
    running.
    """
    told = (
        error.why
        and error.cure
        and error.where
        and error.where.filename == __file__
        and "loss_of" in str(error.where)
    )
    return error.code if told else f"{error.code} without a cause, a cure or the line: {error}"


def other_plan(rank: int) -> str:
    """Bucket sizes differ."""
    return _train(_compiled(bucket_cap_mb=CAP * (1 + rank)), rank)


def other_settings(rank: int, both: dict[str, Any], one: dict[str, Any]) -> str:
    """Rank 1 has other arguments, and DDP itself would reduce."""
    return _train(_compiled(**both, **(one if rank == 1 else {})), rank)


def without_gradient(rank: int, variant: str = "in the graph") -> str:
    """A parameter that no loss sees, and DDP was not told."""
    return _train(_compiled(Unused, **VARIANTS[variant]), rank)


def without_gradient_later(rank: int, variant: str = "in the graph") -> str:
    """All parameters are used at first, then one is not."""
    module = _compiled(**VARIANTS[variant])
    first = _train(module, rank, steps=2)
    module.module.layers[-1].forward = lambda x: x
    return f"{first}, {_train(module, rank, steps=2)}"


def whole_step(rank: int, **ddp: Any) -> Callable[[], str]:
    """Three steps as one program; the given function does one more, and reports the fault."""
    module = DDP(Plain(), bucket_cap_mb=CAP, **ddp)
    train = dynamotor.compile_step(
        module, lambda out, *_: loss_of(out), torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    )
    data = _data(rank, 0, torch.float32)

    def step() -> str:
        try:
            train(data)  # loss_of
        except DynamotorError as error:
            return code_of(error)
        return "no error"

    assert [step() for _ in range(3)] == ["no error"] * 3 and not train.reasons
    return step


def dies_in_backward(rank: int) -> dict[str, str]:
    """Rank 1 is gone in the middle of a backward; the other one runs into it with a module of each kind."""
    step = whole_step(rank)
    modules = {name: _compiled(**variant) for name, variant in VARIANTS.items()}
    for module in modules.values():
        assert _train(module, rank, steps=2) == "no error"
    outs = {name: module(_data(rank, 2, torch.float32)) for name, module in modules.items()}
    found = {}
    for name, out in outs.items():
        if rank == 1:
            out.register_hook(lambda grad: os._exit(0))
        try:
            loss_of(out).backward()
            found[name] = "no error"
        except DynamotorError as error:
            found[name] = code_of(error)
    return {**found, "whole step": step()}


def dies_while_the_device_waits(rank: int, folder: str) -> str:
    """Rank 1 is gone in the middle of a backward; the other one's GPU waits for it, and its message goes to
    a file.
    """
    module = _compiled()
    assert _train(module, rank, steps=2) == "no error"
    out = module(_data(rank, 2, torch.float32))
    if rank == 1:
        out.register_hook(lambda grad: os._exit(0))
    os.dup2(os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT), 2)
    loss_of(out).backward()
    torch.cuda.synchronize()
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


def hangs_in_backward(rank: int) -> dict[str, str]:
    """Rank 1 stays away from a backward for longer than its group waits; each kind of module has a group of
    its own.
    """
    step = whole_step(rank, process_group=dist.new_group(timeout=timedelta(seconds=1.5)))
    found = {"whole step": step() if rank == 0 else "no error"}
    dist.barrier()
    for name, variant in VARIANTS.items():
        module = _compiled(process_group=dist.new_group(timeout=timedelta(seconds=1.5)), **variant)
        assert _train(module, rank, steps=2) == "no error"
        out = module(_data(rank, 2, torch.float32))
        began = time.monotonic()
        try:
            if rank == 0:
                loss_of(out).backward()
            found[name] = "no error"
        except DynamotorError as error:
            found[name] = code_of(error) if time.monotonic() - began < 8.0 else "too late"
        dist.barrier()
    return found


def never_compiles(rank: int) -> str:
    """Rank 1 trains its DDP module uncompiled."""
    module = _compiled()
    dist.barrier()  # the other's module is made, too, before one gives up
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
