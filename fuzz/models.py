"""Models and losses of training worlds: Python of a user's own in the forward, in its hooks and in its backward.

Each model has the layers `norm`, `first` and `second` and a `factor`, which changes reach.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

KNOB = types.SimpleNamespace(scale=1.0, values=[1.0, 2.0], table={"scale": 1.0}, fails=False)
SEEN: list[Any] = []  # what models append to


class Asked(Exception):
    """A forward or a loss raises it where `KNOB.fails`."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)  # in front: a bias in front of it would have no gradient but rounding
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 3)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.norm(x)))) * self.factor


class Scaled(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.held = KNOB
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * Scaled.factor * ctx.held.scale


class WithFunction(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Scaled.apply(self.first(self.norm(x))) @ self.first.weight)


class Hooked(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(self.norm(x)) * 1
        if h.requires_grad:
            h.register_hook(lambda g: g * KNOB.table["scale"])
        return self.second(torch.tanh(h)) * self.factor


class Checkpointed(Net):
    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x)) * self.factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.part, self.norm(x), use_reentrant=False))


class Dropping(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(x), 0.3 * min(KNOB.scale, 1.0), self.training)
        return self.second(torch.tanh(self.first(x)) + torch.rand(3, dtype=x.dtype)) * self.factor


class Counting(Net):
    """State of Python and a buffer that the forward changes; layers are dropped by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, {"n": 0}
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen["n"] += len(x)
        h = torch.tanh(self.first(self.norm(x)))
        if random.random() < 0.7:
            h = h + self.second(h)
        with torch.no_grad():
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        SEEN.append(self.calls)
        return self.second(h) * self.factor + self.average / self.calls


class Broken(Net):
    """Graph breaks, a branch that data decides, an error."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(self.norm(x))
        print(end="")
        if h.detach().sum() > 0:
            h = h * KNOB.values[0]
        if KNOB.fails:
            with torch.no_grad():
                raise Asked
        return self.second(torch.tanh(h)) * self.factor


class Shared(Net):
    """One module twice, a loop over a list, a closure, an option that is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.second, self.second])
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.scales = [1.0, 0.5]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(self.norm(x))
        for block, scale in zip(self.blocks, self.scales):
            h = block(self.activation(h)) * scale
        return h * self.factor


MODELS: tuple[type[Net], ...] = (
    Net, WithFunction, Hooked, Checkpointed, Dropping, Counting, Broken, Shared, Net,
)  # fmt: skip


def _plain(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out, y)


def _logged(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(out, y) * KNOB.scale
    SEEN.append(round(float(loss.detach()), 4))
    return loss


def _of_default(out: torch.Tensor, y: torch.Tensor, smoothing: float = 0.1) -> torch.Tensor:
    if KNOB.fails:
        raise Asked
    return nn.functional.cross_entropy(out, y, label_smoothing=smoothing)


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [1.0, 0.5]

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        part = out.pow(2).mean() * self.weights[1]
        return nn.functional.cross_entropy(out, y) * self.weights[0] + part


LOSSES: tuple[Callable[[], Callable[..., torch.Tensor]], ...] = (
    lambda: _plain,
    lambda: _logged,
    lambda: types.FunctionType(_of_default.__code__, globals(), "loss", _of_default.__defaults__),
    Criterion,
)
