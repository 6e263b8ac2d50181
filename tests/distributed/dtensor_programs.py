"""Programs of DTensors, run by both ranks: compiled in one graph, beside eager.

>>> pair.run(compared, "matmul")     # on each rank: {"same": True, "graphs": 1, ...}
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _random, distribute_tensor
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


class OffsetDraws:
    """Stands in for the tracker that DTensors have on GPUs: each shard has numbers of its own, replicas have the same."""

    distribute_region_enabled = True

    @contextlib.contextmanager
    def _distribute_region(self, spec: Any, generator: Any = None) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.manual_seed(7 + (0 if spec.is_replicated() else spec.mesh.get_local_rank()))
        yield
        torch.set_rng_state(before)


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x.sin(), 0.5) * 2,
    "numbers of a shape": lambda x: torch.rand_like(x) + x,
    "in place": lambda x: torch.empty_like(x).uniform_() + x,
}


def drawn(rank: int, name: str, tracked: bool) -> list[bool]:
    """Whether a compiled program draws as eager does where PyTorch tracks draws of DTensors (with equal ones of replicas,
    though ranks have seeds of their own), else whether replicas agree if and only if seeds do.
    """
    mesh, program, found = init_device_mesh("cpu", (2,)), RANDOM[name], []
    with patch.object(_random, "_rng_tracker", OffsetDraws() if tracked else None):
        for placement in (Replicate(), Shard(0)):
            dynamotor.reset()
            x = distribute_tensor(torch.ones(8, 6), mesh, [placement])
            compiled = dynamotor.compile(program)
            for seed in (5, 5 + rank):
                torch.manual_seed(seed)
                ours = [compiled(x).to_local() for _ in range(2)]
                torch.manual_seed(seed)
                eager = [program(x).to_local() for _ in range(2)]
                both = [torch.empty_like(ours[0]) for _ in range(2)]
                dist.all_gather(both, ours[0])
                agree = torch.equal(*both)
                if tracked:
                    found += [all(map(torch.equal, ours, eager)), agree is isinstance(placement, Replicate)]
                else:
                    found += [agree is (seed == 5) if rank else True, not torch.equal(*ours)]
    return found


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
