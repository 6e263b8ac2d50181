"""Programs of the two processes beyond DDP: sharded optimizers, FSDP2, functional collectives in compiled
functions.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ddp_cases import Plain, _data, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamotor
from dynamotor.base.events import collect


def zero(rank: int) -> dict[str, Any]:
    """Adam whose state is spread over the ranks, over compiled DDP and over eager DDP."""
    dynamotor.reset()
    torch.manual_seed(0)
    model = Plain().double()
    modules = [DDP(copy.deepcopy(model), bucket_cap_mb=0.01) for _ in range(2)]
    runs = [modules[0], dynamotor.compile(modules[1])]
    optimizers = [ZeroRedundancyOptimizer(m.parameters(), torch.optim.Adam, lr=1e-2) for m in modules]
    for step in range(4):
        for run, optimizer in zip(runs, optimizers):
            optimizer.zero_grad()
            loss_of(run(_data(rank, step, torch.float64))).backward()
            optimizer.step()
    return {"difference": _apart(modules), "modes": dict(dynamotor.counters["ddp"])}


def fsdp(rank: int) -> dict[str, Any]:
    """FSDP2 shards each layer and the whole."""
    dynamotor.reset()
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = Plain(3)
    modules = [copy.deepcopy(model) for _ in range(2)]
    for module in modules:
        for layer in module.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    runs = [modules[0], dynamotor.compile(modules[1], backend="aot_eager")]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
    for step in range(3):
        for run, optimizer in zip(runs, optimizers):
            optimizer.zero_grad()
            loss_of(run(_data(rank, step, torch.float32))).backward()
            optimizer.step()
    return {
        "difference": _apart(modules),
        "graphs": dynamotor.counters["capture"]["graphs"],
        "failed": dynamotor.counters["frames"]["failed"],
    }


def _apart(modules: list[Any]) -> float:
    pairs = zip(*(m.parameters() for m in modules), strict=True)
    return max(
        float(
            (p - q).detach().abs().max()
            if type(p.data) is torch.Tensor or not hasattr(p, "to_local")
            else (p - q).to_local().detach().abs().max()
        )
        for p, q in pairs
    )


def every_collective(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    y = x @ w
    summed = functional.all_reduce(y, "sum", group)
    other = (x * 2).tanh() @ w
    gathered = functional.all_gather_tensor(other, 0, group)
    beside = functional.all_gather_tensor(other, 1, group)
    scattered = functional.reduce_scatter_tensor(y.exp(), "sum", 0, group)
    swapped = functional.all_to_all_single(other, None, None, group)
    return (
        summed.sum()
        + (gathered * gathered).sum()
        + beside.cos().sum()
        + scattered.sum() * 0.5
        + (swapped * swapped).sum()
        + other.sum()
    )


def unused_collective(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    return (x @ w).sum()


def long_collective(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Much is computed while two messages are on their way."""
    group = dist.group.WORLD
    y = x.tanh() @ w
    gathered = functional.all_gather_tensor(y.sin().repeat(4096, 8), 0, group)
    scattered = functional.reduce_scatter_tensor(y.cos().repeat(4096, 8), "sum", 0, group)
    for _ in range(4):
        y = (y.repeat(64, 1) @ w.t()).sin()[:4] @ w
    return (gathered * gathered).mean() + scattered.square().mean() + y.sum()


def collectives(rank: int, name: str, backend: str) -> dict[str, Any]:
    """A function with collectives, compiled and not: results, gradients, and the order of starts and waits in
    its programs.
    """
    dynamotor.reset()
    function = {"every": every_collective, "unused": unused_collective, "long": long_collective}[name]
    torch.manual_seed(rank)
    x = torch.randn(4, 6, dtype=torch.float64)
    weights = [torch.ones(6, 4, dtype=torch.float64).requires_grad_() for _ in range(2)]
    compiled = dynamotor.compile(function, backend=backend, fullgraph=True)
    with collect("aten_graph") as events:
        for _ in range(2):
            for weight in weights:
                weight.grad = None
            expected, got = function(x, weights[0]), compiled(x, weights[1])
            expected.backward()
            got.backward()
    with torch.no_grad():
        quiet = float((function(x, weights[0]) - compiled(x, weights[1])).abs())
    graphs = {
        e.data["stage"]: [_short(n) for n in e.data["graph"].graph.nodes if n.op == "call_function"]
        for e in events
    }
    return {
        "value": float((expected - got).detach().abs()),
        "quiet": quiet,
        "graphs": graphs,
        "gradient": float((weights[0].grad - weights[1].grad).abs().max()),
        "breaks": dict(dynamotor.counters["breaks"]),
    }


def _short(node: Any) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(node.target)
