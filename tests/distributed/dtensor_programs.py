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


def report(found: list[list[Any]], before: int) -> dict[str, Any]:
    """Which results are the same, and how they were captured."""
    same = all(type(a) is type(b) and torch.allclose(local(a), local(b), atol=1e-5) for a, b in zip(*found))
    return {
        "same": same,
        "graphs": counters["capture"]["graphs"] - before,
        "left": dict(counters["fallback"]),
    }
