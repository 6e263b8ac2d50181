"""More programs of the two processes: changes on the way, and calls that must be left alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
import torch.distributed as dist
from ddp_cases import CAP, Plain, Tied, _comm_hook, _data, _gradient_hook, loss_of
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamotor
from dynamotor.distributed.averager import averager_of


class Twins:
    """The same model under eager DDP and under compiled DDP."""

    def __init__(self, rank: int, dynamic: bool | None = None, **ddp: Any) -> None:
        dynamotor.reset()
        torch.manual_seed(0)
        model = Plain().double()
        self.rank = rank
        self.eager, self.inner = (DDP(copy.deepcopy(model), bucket_cap_mb=CAP, **ddp) for _ in range(2))
        self.ours = dynamotor.compile(self.inner, backend="aot_eager", dynamic=dynamic)

    def data(self, step: int, rows: int = 6) -> torch.Tensor:
        return _data(self.rank, step, torch.float64, rows)

    def step(self, step: int, rows: int = 6) -> None:
        for module in (self.eager, self.ours):
            module.zero_grad()
            loss_of(module(self.data(step, rows))).backward()

    def apart(self, other: Any = None) -> float:
        return max(
            float((p.grad - q.grad).abs().max())
            for p, q in zip(self.eager.parameters(), (other or self.inner).parameters(), strict=True)
        )

    def same(self) -> bool:
        flat = torch.cat([p.grad.flatten() for p in self.inner.parameters()])
        both = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(both, flat)
        return torch.equal(*both)


def changes(rank: int, what: str) -> tuple[float, bool]:
    """Two steps, then a hook, then three more; the largest difference of gradients."""
    twins = Twins(rank)
    worst, same = 0.0, True
    for step in range(5):
        if step == 2:
            for module in (twins.eager, twins.inner):
                {"gradient hook": _gradient_hook, "comm hook": _comm_hook}[what](module)
        twins.step(step)
        worst, same = max(worst, twins.apart()), same and twins.same()
    return worst, same


def join(rank: int) -> float:
    """Uneven inputs under `join`, then even ones."""
    twins = Twins(rank)
    twins.step(0)
    for module in (twins.eager, twins.ours):
        with module.join():
            for step in range(2 + rank):
                module.zero_grad()
                loss_of(module(twins.data(step + 10))).backward()
    worst = twins.apart() if rank == 1 else 0.0
    twins.step(20)
    return max(worst, twins.apart())


def autograd_grad(rank: int, late: bool) -> tuple[float, float]:
    """`torch.autograd.grad` gives this rank's own gradients; it and `backward(inputs=...)` leave parameters'
    `.grad` alone.
    """
    twins = Twins(rank)
    twins.step(0)
    if late:  # a hook that changes nothing makes the rank reduce after the backward
        next(twins.inner.parameters()).register_hook(lambda grad: None)
        twins.step(3)
    eager, ours = (
        torch.autograd.grad(loss_of(m(twins.data(1))), list(n.parameters()))
        for m, n in ((twins.eager, twins.eager), (twins.ours, twins.inner))
    )
    for module in (twins.eager, twins.ours):
        x = twins.data(2).requires_grad_()
        loss_of(module(x)).backward(inputs=[x])
    return max(float((a - b).abs().max()) for a, b in zip(eager, ours)), twins.apart()


def many_shapes(rank: int) -> tuple[float, int]:
    """More batch sizes than are compiled: the rest runs eager and is reduced all the same."""
    twins = Twins(rank, dynamic=False)
    worst = 0.0
    with dynamotor.config.patch(cache_size_limit=3):
        for step in range(6):
            twins.step(step, rows=2 + step)
            worst = max(worst, twins.apart())
    return worst, dynamotor.counters["frames"]["cache_limit"]


def changing_rows(rank: int) -> tuple[float, int, dict[str, int]]:
    """Batches that differ from step to step and from rank to rank, none but the first of a size of its own."""
    twins, worst = Twins(rank), 0.0
    for step, rows in enumerate([(6, 6), (4, 6), (7, 3), (9, 9), (5, 12)]):
        twins.step(step, rows=rows[rank])
        worst = max(worst, twins.apart())
    return worst, dynamotor.counters["frames"]["captured"], dict(dynamotor.counters["ddp"])


def copies(rank: int) -> list[float]:
    """Copied and unpickled modules train like the original."""
    twins = Twins(rank)
    twins.step(0)
    others = [copy.deepcopy(twins.inner), pickle.loads(pickle.dumps(twins.inner)), copy.deepcopy(twins.ours)]
    for other in others:
        other.zero_grad()
        loss_of(other(twins.data(1))).backward()
    twins.step(1)
    return [twins.apart(other) for other in others]


def memory(rank: int) -> tuple[int, int]:
    """How many pieces of memory the gradients of four steps had, and how many buckets there are."""
    torch.manual_seed(0)
    dynamotor.reset()
    module = DDP(Plain(4), bucket_cap_mb=0.001)
    compiled = dynamotor.compile(module, backend="aot_eager")
    seen = set()
    for step in range(4):
        module.zero_grad()
        loss_of(compiled(_data(rank, step, torch.float32))).backward()
        seen |= {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
    return len(seen), len({p.grad.untyped_storage().data_ptr() for p in module.parameters()})


def called_inside(rank: int) -> tuple[float, dict[str, int], int]:
    """A compiled function that calls a DDP module which is not compiled itself."""
    twins = Twins(rank)

    def loss(x):
        return loss_of(twins.inner(x * 1.0))

    compiled = dynamotor.compile(loss, backend="aot_eager")
    worst = 0.0
    for step in range(3):
        twins.eager.zero_grad()
        twins.inner.zero_grad()
        loss_of(twins.eager(twins.data(step) * 1.0)).backward()
        compiled(twins.data(step)).backward()
        worst = max(worst, twins.apart())
    return worst, dict(dynamotor.counters["ddp"]), sum(dynamotor.counters["breaks"].values())


def frozen_later(rank: int) -> str:
    """A parameter is frozen after the plan was made: DDP does not allow that, and says so."""
    twins = Twins(rank)
    twins.step(0)
    twins.inner.module.layers[3].weight.requires_grad_(False)
    twins.inner.zero_grad()
    try:
        loss_of(twins.ours(twins.data(1))).backward()
    except dynamotor.DynamotorError as error:
        return error.code
    return "no error"


def two_modules(rank: int) -> tuple[float, bool, dict[str, int]]:
    """Two DDP modules that train in turns and feed each other, as a generator and its critic do."""
    twins = [Twins(rank), Twins(rank)]
    worst, same = 0.0, True
    for step in range(3):
        for run in ("eager", "ours"):
            first, second = (getattr(t, run) for t in twins)
            for t in twins:
                getattr(t, run).zero_grad()
            loss_of(second(first(twins[0].data(step)))).backward()
        worst = max(worst, *(t.apart() for t in twins))
        same = same and all(t.same() for t in twins)
    return worst, same, dict(dynamotor.counters["ddp"])


def tied_bucket(rank: int) -> tuple[tuple[str, ...], int]:
    """The names of the last bucket of a model whose last layer is its first one's weight, and how often that
    weight is in the plan.
    """
    dynamotor.reset()
    torch.manual_seed(0)
    module = DDP(Tied().double(), bucket_cap_mb=CAP)
    loss_of(dynamotor.compile(module, backend="aot_eager")(_data(rank, 0, torch.float64))).backward()
    plan = averager_of(module).plan
    return tuple(slot.name for slot in plan.buckets[-1].slots), plan.names.count("embed.weight")


def graphs_of_cuda(rank: int) -> tuple[float, dict[str, int]]:
    """Under the backend that replays CUDA graphs a backward with collectives runs as it is."""
    twins = Twins(rank)
    twins.ours = dynamotor.compile(twins.inner, backend="cudagraphs")
    for step in range(4):
        twins.step(step)
    return twins.apart(), dict(dynamotor.counters["fallback"])
