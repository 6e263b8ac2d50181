"""Programs of the two processes: a DDP module trained by `compile_step` beside its copy trained by the eager loop."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_cases import CAP, D, Plain, _comm_hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dynamotor
from dynamotor.base.events import collect, counters
from dynamotor.distributed.reduce_step import ReduceStep


class Normed(Plain):
    """With buffers that each rank would have of its own, were they not sent around."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x):
        return super().forward(self.norm(x))


class Conv(nn.Module):
    """Channels-last inside: weights' gradients have other strides than eager's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, D, 1)

    def forward(self, x):
        return self.second(self.first(x.view(-1, 4, 3, 2)).relu()).mean((2, 3))


class Loop:
    """The eager loop that `compile_step` stands for; the backward is synchronised in the last of several."""

    def __init__(
        self, model: DDP, optimizer: Any, clip: float | None, scaler: Any, accumulate: int, keep_grads: bool
    ) -> None:
        self.model, self.optimizer, self.clip, self.scaler = model, optimizer, clip, scaler
        self.accumulate, self.keep_grads, self.count = accumulate, keep_grads, 0

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.keep_grads and self.count % self.accumulate == 0:
            self.optimizer.zero_grad()
        self.count += 1
        last = self.count % self.accumulate == 0
        with contextlib.nullcontext() if last else self.model.no_sync():
            loss = F.mse_loss(self.model(x), y)
            scaled = loss / self.accumulate
            (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        if last:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            if not self.keep_grads:
                self.optimizer.zero_grad()
        return loss.detach()


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "last layer": lambda p: torch.optim.SGD(list(p)[-2:], lr=0.05, momentum=0.9),
}


class Twins:
    """The same model in both; `steps()` gives their difference."""

    def __init__(
        self,
        rank: int,
        optimizer: str = "adamw",
        make: Callable[[], nn.Module] = Plain,
        backend: str = "native",
        clip: float | None = None,
        scale: float | None = None,
        accumulate: int = 1,
        keep_grads: bool = False,
        ddp: dict[str, Any] | None = None,
        hooked: bool = False,
        placed: bool = False,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        dynamotor.reset()
        counters.clear()
        torch.manual_seed(0)
        model = make().to(dtype)
        self.rank, self.worst, self.dtype = rank, 0.0, dtype
        self.models = [DDP(copy.deepcopy(model), bucket_cap_mb=CAP, **(ddp or {})) for _ in range(2)]
        for m in self.models if placed else ():
            m.device_ids = [0]  # as on a GPU, where DDP moves inputs
        if hooked:
            for m in self.models:
                m.module.layers[0].weight.register_hook(lambda grad: grad * 1.0)
        optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in self.models]
        scalers = [None if scale is None else torch.amp.GradScaler("cpu", scale) for _ in range(2)]
        self.eager = Loop(self.models[0], optimizers[0], clip, scalers[0], accumulate, keep_grads)
        self.step = dynamotor.compile_step(
            self.models[1],
            F.mse_loss,
            optimizers[1],
            clip=clip,
            scaler=scalers[1],
            accumulate=accumulate,
            keep_grads=keep_grads,
            backend=backend,
            **options,
        )
        self.optimizers = optimizers

    def both(self, seed: int, rows: int = 6) -> None:
        g = torch.Generator().manual_seed(1000 * self.rank + seed)
        batch = [torch.randn(rows, D, dtype=torch.float64, generator=g).to(self.dtype) for _ in range(2)]
        losses = [train(*batch) for train in (self.eager, self.step)]
        self.worst = max(self.worst, float((losses[0] - losses[1]).abs()))

    def result(self) -> dict[str, Any]:
        """The largest difference of losses, weights, buffers, gradients; whether the ranks have the same; how steps ran."""
        for a, b in zip(*(m.state_dict().values() for m in self.models), strict=True):
            self.worst = max(self.worst, float((a - b).abs().max()))
        for a, b in zip(*(m.parameters() for m in self.models), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                self.worst = max(self.worst, float((a.grad - b.grad).abs().max()))
                assert a.grad.stride() == b.grad.stride()
        flat = torch.cat([p.detach().flatten() for p in self.models[1].parameters()])
        others = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(others, flat)
        return {
            "worst": self.worst,
            "same": torch.equal(*others),
            "programs": counters["step"]["programs"],
            "why": [code for code, _ in self.step.reasons],
            "text": self.step.explain(),
        }


def train(rank: int, how: dict[str, Any], steps: int = 4) -> dict[str, Any]:
    """A few steps."""
    twins = Twins(rank, **how)
    for seed in range(steps * how.get("accumulate", 1)):
        twins.both(seed)
    return twins.result()


def convolutions(rank: int, accumulate: int) -> dict[str, Any]:
    """A few steps; several to an update are a compiled forward and backward first."""
    twins = Twins(rank, "sgd", Conv, dtype=torch.float32, accumulate=accumulate)
    for seed in range(3 * accumulate):
        twins.both(seed)
    return twins.result()


def buffers(rank: int) -> dict[str, Any]:
    """Running statistics are the first rank's, also after a step that the other ranks do not know of."""
    twins = Twins(rank, make=Normed, backend="aot_eager")
    for seed in range(6):
        with contextlib.ExitStack() as stack:
            for model in twins.models if seed in (2, 3) else ():
                stack.enter_context(model.no_sync())
            twins.both(seed)
    return twins.result()


def sizes(rank: int) -> dict[str, Any]:
    """Ranks with batches of their own sizes, which change at different times, and evaluation in between."""
    twins = Twins(rank, backend="aot_eager")
    for seed in range(6):
        if seed == 3:
            for model in twins.models:
                model(torch.ones(3, D, dtype=torch.float64))
        twins.both(seed, rows=4 + rank * (seed // 2) % 3)
    return twins.result()


def beyond_the_limit(rank: int) -> dict[str, Any]:
    """More batch sizes on one rank than graphs are kept."""
    twins = Twins(rank, backend="aot_eager", options={"cache_size_limit": 2})
    for seed in range(6):
        twins.both(seed, rows=4 + rank * seed)
    return twins.result()


def one_in_pieces(rank: int, late: bool) -> dict[str, Any]:
    """On one rank alone the steps are not one program, from the start or from then on."""
    twins = Twins(rank, "sgd", backend="aot_eager")
    for seed in range(4):
        if rank == 1 and seed == 2 * late:
            twins.optimizers[1].register_step_post_hook(lambda *_: None)
        twins.both(seed)
    return twins.result()


def disagree(rank: int) -> dict[str, Any]:
    """A parameter of one rank has a hook on its gradient."""
    twins = Twins(rank, "sgd", backend="aot_eager", hooked=rank == 1)
    for seed in range(3):
        twins.both(seed)
    return twins.result()


def loses_a_gradient(rank: int) -> str:
    """A layer is not used any more."""
    twins = Twins(rank, backend="aot_eager")
    for seed in range(2):
        twins.both(seed)
    twins.models[1].module.layers[-1].forward = lambda x: x
    batch = [torch.ones(6, D, dtype=torch.float64)] * 2
    try:
        twins.step(*batch)
    except dynamotor.DynamotorError as error:
        return f"{error.code} {twins.step.reasons[0][1]}"
    return "no error"


def comm_hook(rank: int) -> dict[str, Any]:
    """A communication hook, registered when steps are one program already."""
    twins = Twins(rank, backend="aot_eager")
    for seed in range(5):
        if seed == 3:
            for model in twins.models:
                _comm_hook(model)
        twins.both(seed)
    return twins.result()


def module_hook(rank: int) -> tuple[dict[str, Any], int]:
    """A forward hook of the DDP module itself, registered later."""
    twins, seen = Twins(rank, backend="aot_eager"), []
    for seed in range(4):
        if seed == 2:
            twins.models[1].register_forward_hook(lambda *_: seen.append(0))
        twins.both(seed)
    return twins.result(), len(seen)


def order(rank: int, clip: float | None) -> tuple[list[tuple[str, int]], list[int]]:
    """The events of the last step's buckets; how many parameters have changed when each bucket is waited for."""
    twins = Twins(rank, "sgd", clip=clip)
    for seed in range(3):
        twins.both(seed)
    parameters = list(twins.models[1].parameters())
    before = [p.detach().clone() for p in parameters]
    changed, finish = [], ReduceStep.finish

    def counting(step: ReduceStep, bucket: int) -> Any:
        changed.append(sum(not torch.equal(*pair) for pair in zip(before, parameters, strict=True)))
        return finish(step, bucket)

    ReduceStep.finish = counting
    try:
        with collect("bucket") as events:
            twins.both(3)
    finally:
        ReduceStep.finish = finish
    return [(e.data["what"], e.data["bucket"]) for e in events], changed
