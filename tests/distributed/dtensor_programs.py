"""Programs of DTensors, run by both ranks: compiled in one graph, beside eager.

>>> pair.run(compared, "matmul")     # on each rank: {"same": True, "graphs": 1, ...}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dynamotor
from dynamotor.base.events import counters

REPLICATED = [Replicate()]
PROGRAMS: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, w: (x @ w).relu().sum(1),
    "redistribute": lambda x, w: x.redistribute(placements=REPLICATED).sin().to_local(),
    "full tensor": lambda x, w: (x * 2).full_tensor().sum(),
    "both": lambda x, w: ((x * x.sin()), (x @ w).to_local()),
    "placements made inside": lambda x, w: (
        x.redistribute(placements=[Replicate()]).sin().to_local(grad_placements=[Partial()])
    ),
    "a transposed sum of both ranks": lambda x, w: (x.t() @ x.sin()).t(),
    "made inside and returned": lambda x, w: DTensor.from_local(
        (x @ w).to_local() * 2, x.device_mesh, [Shard(0)]
    ),
}


def local(value: Any) -> Any:
    """A DTensor's part on this rank."""
    return value.to_local() if isinstance(value, DTensor) else value


def compared(rank: int, name: str) -> dict[str, Any]:
    """Results and gradients of a program."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    dynamotor.reset()
    before = counters["capture"]["graphs"]
    for compile in (lambda fn: fn, dynamotor.compile):
        torch.manual_seed(0)
        x = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(torch.randn(6, 4), mesh, REPLICATED).requires_grad_()
        results = compile(PROGRAMS[name])(x, w)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward([local(result).sum() for result in results])
        found.append([*results, x.grad, *([] if w.grad is None else [w.grad])])
    return report(found, before)


def trained(rank: int, steps: int) -> dict[str, Any]:
    """Parameters behind steps of a tensor-parallel block."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    dynamotor.reset()
    before = counters["capture"]["graphs"]
    for compile in (lambda model: model, dynamotor.compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        run, optimizer = compile(model), torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            run(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
        found.append(list(model.parameters()))
    return report(found, before)


def whole_steps(rank: int) -> dict[str, Any]:
    """`compile_step` of a tensor parallel block, beside the loop that it stands for."""
    found: list[list[Any]] = [[], []]
    for compiled, values in zip((False, True), found):
        dynamotor.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
        parallelize_module(
            model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        step = dynamotor.compile_step(model, torch.nn.functional.mse_loss, optimizer)
        for _ in range(3):
            x, y = torch.randn(4, 8).double(), torch.randn(4, 8).double()
            if compiled:
                values.append(step(x, y))
            else:
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                values.append(loss.detach())
            values += map(local, (p.detach().clone() for p in model.parameters()))
    same = all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(*found, strict=True))
    return {"same": same, "text": step.explain()}


def report(found: list[list[Any]], before: int) -> dict[str, Any]:
    """Which results are the same, and how they were captured."""
    same = all(type(a) is type(b) and torch.allclose(local(a), local(b), atol=1e-5) for a, b in zip(*found))
    return {
        "same": same,
        "graphs": counters["capture"]["graphs"] - before,
        "left": dict(counters["fallback"]),
    }
