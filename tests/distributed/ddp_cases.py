"""Programs of the two processes: small models trained by eager DDP and by compiled DDP on the same data, side by
side.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import dynamotor
from dynamotor.base.events import collect

D = 24
CAP = 3 * D * D * 8 / 2**20  # three float64 weights a bucket


class Plain(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


class Keywords(nn.Module):
    """Parameters handed over by keyword, in lists, and at module level."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.randn(D, D) / D**0.5 for _ in range(6))
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        x = F.linear(x, weight=self.w[0]).relu()
        x = F.linear(x, weight=self.w[1], bias=self.scale).relu()
        w = list(self.w)
        for a, b in zip(w[2::2], w[3::2]):
            x = (x @ torch.cat([a, b], 1))[:, :D].tanh()
        return torch.stack([x * self.scale, x + self.w[5].sum()]).mean(0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(D, D)
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x):
        x = self.embed(x.argmax(1))
        for layer in self.layers:
            x = layer(x).relu()
        return F.linear(x, self.embed.weight)


class Unused(Plain):
    """A branch that no loss sees; `choose` picks the layer that is left out."""

    def forward(self, x):
        for layer in list(self.layers)[:-1]:
            x = F.gelu(layer(x))
        return x


class Broken(Plain):
    """A graph break in the middle."""

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = F.gelu(layer(x))
            if i == 2:
                dynamotor.disable(_nothing)(x)
        return x


def _nothing(x):
    return None


class Checkpointed(Plain):
    def forward(self, x):
        for layer in self.layers[:3]:
            x = F.gelu(layer(x))
        return checkpoint(self._rest, x, use_reentrant=False)

    def _rest(self, x):
        for layer in self.layers[3:]:
            x = F.gelu(layer(x))
        return x


class Normed(nn.Module):
    """Convolutions and batch norm: buffers that DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
        )
        self.head = nn.Linear(8, D)

    def forward(self, x):
        return self.head(self.body(x.reshape(-1, 1, 4, 6)).mean((2, 3)))


class Dictionary(Plain):
    """Takes a keyword and gives a dictionary."""

    def forward(self, x, *, gain=1.0):
        hidden = super().forward(x) * gain
        return {"out": hidden, "norm": hidden.square().mean(1)}


def here() -> torch.device:
    """Where this process computes."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def _data(rank: int, step: int, dtype: torch.dtype, rows: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, D, generator=generator).to(here(), dtype)


def loss_of(out: Any) -> torch.Tensor:
    """A loss in which each output element weighs differently."""
    if isinstance(out, dict):
        return sum(loss_of(value) for value in out.values())
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
    return (out.square() * weights).mean()


def backward_plain(module: nn.Module, rank: int, step: int, dtype: torch.dtype) -> None:
    loss_of(module(_data(rank, step, dtype))).backward()


def backward_keyword(module: nn.Module, rank: int, step: int, dtype: torch.dtype) -> None:
    loss_of(module(_data(rank, step, dtype), gain=0.5)).backward()


def backward_accumulating(module: nn.Module, rank: int, step: int, dtype: torch.dtype) -> None:
    """Two steps without synchronisation, then one with."""
    for part in range(3):
        with module.no_sync() if part < 2 else contextlib.nullcontext():
            loss_of(module(_data(rank, 10 * step + part, dtype))).backward()


def backward_twice(module: nn.Module, rank: int, step: int, dtype: torch.dtype) -> None:
    """Two forwards, one backward."""
    (loss_of(module(_data(rank, step, dtype))) + loss_of(module(_data(rank, step + 50, dtype)))).backward()


def backward_decayed(module: nn.Module, rank: int, step: int, dtype: torch.dtype) -> None:
    """A part of the loss comes from the weights themselves and differs between ranks."""
    decay = sum(p.square().sum() for p in module.module.parameters()) * 1e-2 * (rank + 1)
    (loss_of(module(_data(rank, step, dtype))) + decay).backward()


def backward_uneven(module: nn.Module, rank: int, step: int, dtype: torch.dtype) -> None:
    """The batch of one rank changes its size: it compiles a new graph, the other does not."""
    loss_of(module(_data(rank, step, dtype, rows=6 if rank or step < 2 else 4))).backward()


def backward_evaluating(module: nn.Module, rank: int, step: int, dtype: torch.dtype) -> None:
    """A forward without gradients and one whose result is dropped stand between."""
    with torch.no_grad():
        module(_data(rank, step, dtype))
    module.module(_data(rank, step, dtype))
    loss_of(module(_data(rank, step, dtype))).backward()


def _comm_hook(module: DDP) -> None:
    def hook(state, bucket):
        flat = bucket.buffer().div_(2)
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda f: f.value()[0])

    module.register_comm_hook(None, hook)


def _gradient_hook(module: DDP) -> None:
    next(iter(module.module.parameters())).register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def _freeze(module: nn.Module) -> None:
    for p in list(module.parameters())[2:5]:
        p.requires_grad_(False)


def _ignore(module: nn.Module) -> None:
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["layers.2.weight"])


class Case:
    """A row of the matrix. `expect`: the mode of each graph; `reason`: the code of why not in the graph."""

    def __init__(
        self,
        model: Callable[[], nn.Module] = Plain,
        *,
        backward: Any = backward_plain,
        expect: str = "ingraph",
        reason: str = "",
        dtype: torch.dtype = torch.float64,
        before: Any = None,
        after: Any = None,
        set_to_none: bool = True,
        unequal: tuple[str, ...] = (),
        **ddp: Any,
    ) -> None:
        self.model, self.backward, self.expect, self.reason, self.dtype = (
            model,
            backward,
            expect,
            reason,
            dtype,
        )
        self.before, self.after, self.set_to_none, self.unequal = before, after, set_to_none, unequal
        self.ddp = {"bucket_cap_mb": CAP, **ddp}


CASES: dict[str, Case] = {
    "plain": Case(),
    "default buckets": Case(bucket_cap_mb=None),
    "bucket list": Case(bucket_cap_mb=None, bucket_cap_mb_list=[CAP / 3, CAP]),
    "keywords": Case(Keywords),
    "tied": Case(Tied),
    "frozen": Case(before=_freeze),
    "ignored": Case(before=_ignore, unequal=("layers.2.weight",)),
    "buffers": Case(Normed),
    "no buffer broadcast": Case(Normed, broadcast_buffers=False),
    "dictionary": Case(Dictionary, backward=backward_keyword),
    "bf16": Case(dtype=torch.bfloat16),
    "float32": Case(dtype=torch.float32),
    "no_sync": Case(backward=backward_accumulating),
    "gradients kept": Case(set_to_none=False),
    "bucket view": Case(gradient_as_bucket_view=True),
    "bucket view, gradients kept": Case(gradient_as_bucket_view=True, set_to_none=False),
    "two forwards": Case(backward=backward_twice, reason="several_forwards"),
    "two forwards, gradients kept": Case(
        backward=backward_twice, set_to_none=False, reason="several_forwards"
    ),
    "uneven batch": Case(backward=backward_uneven),
    "evaluation between": Case(backward=backward_evaluating),
    "weight decay in the loss": Case(backward=backward_decayed, reason="outside"),
    "checkpoint": Case(Checkpointed),
    "break": Case(Broken, expect="split", reason="several_graphs"),
    "unused": Case(Unused, find_unused_parameters=True, expect="split", reason="find_unused"),
    "static graph": Case(static_graph=True, expect="split", reason="static_graph"),
    "comm hook": Case(after=_comm_hook, expect="split", reason="comm_hook"),
    "gradient hook": Case(after=_gradient_hook, expect="split", reason="param_hook"),
}


def _pair_of_modules(case: Case, wrap: str, backend: str, mode: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = case.model().to(here(), case.dtype)
    options = {**case.ddp, "device_ids": [here().index]} if here().type == "cuda" else case.ddp
    if case.before:
        case.before(model)
    compiler = lambda m: dynamotor.compile(m, backend=backend, options={"ddp": mode})  # noqa: E731
    eager = DDP(copy.deepcopy(model), **options)
    inner = copy.deepcopy(model)
    if case.before:  # attributes of the module, not of its parameters
        case.before(inner)
    ours = DDP(compiler(inner), **options) if wrap == "inside" else DDP(inner, **options)
    if case.after:
        case.after(eager)
        case.after(ours)
    return eager, compiler(ours) if wrap == "outside" else ours


def _difference(eager: nn.Module, ours: nn.Module) -> float:
    """The largest difference of any gradient, relative to the largest element of all."""
    worst = 0.0
    scale = max(float(p.grad.abs().max()) for p in eager.module.parameters() if p.grad is not None)
    for (name, p), q in zip(eager.module.named_parameters(), ours.module.parameters(), strict=True):
        if (p.grad is None) != (q.grad is None):
            return float("inf")
        if p.grad is not None:
            assert p.grad.stride() == q.grad.stride() and p.grad.dtype is q.grad.dtype, name
            worst = max(worst, float((p.grad - q.grad).abs().max()) / scale)
    return worst


def _same_on_ranks(module: nn.Module, unequal: tuple[str, ...]) -> bool:
    flat = torch.cat(
        [
            p.grad.flatten()
            for name, p in module.module.named_parameters()
            if p.grad is not None and name not in unequal
        ]
    )
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    return torch.equal(*both)


def compare(
    rank: int, name: str, wrap: str, backend: str, mode: str = "auto", steps: int = 4
) -> dict[str, Any]:
    """Train both ways; how far gradients and buffers are apart, whether the ranks agree, and what they
    compiled how.
    """
    case = CASES[name]
    dynamotor.reset()
    eager, ours = _pair_of_modules(case, wrap, backend, mode)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (eager, ours)]
    worst, same = 0.0, True
    with collect("bucket", "ddp") as events:
        for step in range(steps):
            for module, optimizer in zip((eager, ours), optimizers):
                optimizer.zero_grad(set_to_none=case.set_to_none)
                case.backward(module, rank, step, case.dtype)
            worst = max(worst, _difference(eager, ours))
            same = same and _same_on_ranks(ours, case.unequal)
            for optimizer in optimizers:
                optimizer.step()
    buffers = max([float((a - b).abs().max()) for a, b in zip(eager.buffers(), ours.buffers())], default=0.0)
    return {
        "gradients": worst,
        "buffers": buffers,
        "same": same,
        "modes": dict(dynamotor.counters["ddp"]),
        "fallback": dict(dynamotor.counters["fallback"]),
        "captured": dynamotor.counters["capture"]["graphs"],
        "buckets": sum(e.kind == "bucket" and e.data["what"] == "ready" for e in events),
    }


def whole_batch(rank: int, name: str) -> float:
    """How far compiled DDP's gradients are from those of one process that sees both ranks' data."""
    case = CASES[name]
    dynamotor.reset()
    torch.manual_seed(0)
    model = case.model().to(here(), case.dtype)
    alone = copy.deepcopy(model)
    module = dynamotor.compile(DDP(model, **case.ddp))
    case.backward(module, rank, 0, case.dtype)
    sum(loss_of(alone(_data(other, 0, case.dtype))) / 2 for other in range(2)).backward()
    return max(
        float((p.grad - q.grad).abs().max())
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )
