"""Programs over sharded parameters (`fully_shard`, tensor parallel plans), run by both ranks: in eager, and compiled
whole or block by block.

>>> pair.run(differences, "fully_shard", "whole", "native")     # on each rank
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dynamotor
from dynamotor.base.events import counters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(model: Net, **settings: object) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)


def parallel(model: Net) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


PLANS: dict[str, Callable[[Net], None]] = {
    "fully_shard": sharded,
    "fully_shard, parameters kept": lambda model: sharded(model, reshard_after_forward=False),
    "fully_shard in bfloat16": lambda model: sharded(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "tensor parallel": parallel,
}


def differences(rank: int, plan: str, how: str, backend: str) -> dict[str, float]:
    """How far compiled steps are from eager's, relative to each tensor's largest number, and the graphs made."""
    want = _steps(rank, plan, lambda model: model)
    before = counters["capture"]["graphs"]

    def compiled(model: Net) -> nn.Module:
        if how == "whole":
            return dynamotor.compile(model, backend=backend)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = dynamotor.compile(block, backend=backend)
        return model

    got = _steps(rank, plan, compiled)
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
    return {"worst": worst, "graphs": counters["capture"]["graphs"] - before}


def _steps(rank: int, plan: str, compiled: Callable[[Net], nn.Module]) -> list[torch.Tensor]:
    """Losses, gradients and parameters of three steps."""
    torch.manual_seed(0)
    model = Net()
    PLANS[plan](model)
    call = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(rank if plan.startswith("fully") else 0)
    found = []
    for _ in range(3):
        loss = call(torch.randn(4, 8, generator=draw)).float().square().mean()
        loss.backward()
        found += [loss.detach().clone(), *(_whole(p.grad) for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(_whole, model.parameters())]


def _whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
