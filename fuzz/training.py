"""Small worlds of training: a model, an optimizer (PyTorch's, or one of a user's own that looks things up or leaves
effects), what clips, a scaler.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import dynamotor

from .models import KNOB, LOSSES, MODELS, SEEN, Net

SCALE, LOG = 1.0, []  # what functions below read and append to as globals


class World:
    """A model, its optimizer and all that changes reach."""

    def __init__(self, seed: int) -> None:
        chosen = random.Random(seed)
        torch.manual_seed(seed)
        random.seed(seed)
        set_globals(1.0)
        self.model, self.loss = _made(seed)
        self.rows = 5  # of a batch
        self.cell = [1.0]
        self.scale = 1.0
        self.seen: list[Any] = []
        self.undo: list[Callable[[], None]] = []
        self.schedulers: list[Any] = []
        self.handles: list[Any] = []
        self.optimizer_name = chosen.choice(list(OPTIMIZERS))
        self.spare = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        parameters = list(self.model.parameters())
        if chosen.random() < 0.4:
            groups: Any = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}]
        else:
            groups = parameters
        self.optimizer = OPTIMIZERS[self.optimizer_name](groups)
        self.optimizer_world = self
        self.clip_name = chosen.choice(list(CLIPS))
        self.clip = CLIPS[self.clip_name](self)
        self.scaler = None
        if chosen.random() < 0.25:
            kind = chosen.choice([torch.amp.GradScaler, torch.amp.GradScaler, Halving])
            self.scaler = kind("cpu", init_scale=64.0, growth_interval=2)
        self.accumulate = chosen.choice([1, 1, 1, 2])
        self.keep_grads = chosen.random() < 0.2
        self.alone = self.scaler is None and chosen.random() < 0.3  # the optimizer's step alone is compiled
        self.modes: dict[str, Callable[[], Any]] = {}  # around each step
        self.saved = copy.deepcopy(self.optimizer.state_dict())

    def close(self) -> None:
        """Undo what reaches beyond this world."""
        for undo in reversed(self.undo):
            undo()
        for handle in self.handles:
            handle.remove()

    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """The modes that hold around a step now."""
        with contextlib.ExitStack() as stack:
            for mode in self.modes.values():
                stack.enter_context(mode())
            yield

    def step(self, update: Callable[[], Any] | None = None) -> Callable[..., torch.Tensor]:
        """The eager loop. `update`: in the place of the optimizer's step."""
        count = 0
        update = update or (self.optimizer.step if self.alone else None)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            nonlocal count
            if self.keep_grads and count % self.accumulate == 0:
                self.optimizer.zero_grad()
            loss = self.loss(self.model(x), y)
            part = loss if self.accumulate == 1 else loss / self.accumulate
            (part if self.scaler is None else self.scaler.scale(part)).backward()
            count += 1
            if count % self.accumulate == 0:
                self._update(update)
                if not self.keep_grads:
                    self.optimizer.zero_grad()
            return loss.detach()

        return step

    def _update(self, update: Callable[[], Any] | None) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if callable(self.clip):
            self.clip(list(dict.fromkeys(self.parameters())))
        elif self.clip is not None:
            nn.utils.clip_grad_norm_(list(dict.fromkeys(self.parameters())), self.clip)
        if self.scaler is None:
            (update or self.optimizer.step)()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def compiled(self, backend: str) -> Callable[..., torch.Tensor]:
        """The compiled step, or the eager loop around a compiled update."""
        if self.alone:
            return self.step(dynamotor.compile(self.optimizer.step, backend=backend))
        return dynamotor.compile_step(
            self.model,
            self.loss,
            self.optimizer,
            clip=self.clip,
            scaler=self.scaler,
            accumulate=self.accumulate,
            keep_grads=self.keep_grads,
            backend=backend,
        )

    def observed(self) -> Any:
        """All that a user may look at, as plain data."""
        numbers = {id(p): k for k, p in enumerate([*self.model.parameters(), self.spare])}
        groups = [
            {k: [numbers.get(id(p), -1) for p in v] if k == "params" else plain(v) for k, v in group.items()}
            for group in self.optimizer.param_groups
        ]
        state = [
            (numbers.get(id(k), -1) if isinstance(k, torch.Tensor) else k, plain(v))
            for k, v in self.optimizer.state.items()
        ]
        tensors = [*self.model.parameters(), *self.model.buffers(), self.spare]
        return {
            "weights": [plain(t) for t in tensors],
            "gradients": [plain(t.grad) for t in tensors],
            "groups": groups,
            "state": state,
            "seen": plain(self.seen),
            "log": plain(LOG),
            "of the model": plain([*SEEN, getattr(self.model, "calls", 0), getattr(self.model, "seen", {})]),
            "scaler": None if self.scaler is None else plain(self.scaler.state_dict()),
            "random": random.getstate()[1][-1],
        }


def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out, y) * SCALE


def _made(seed: int) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """The model and the loss of a seed: the plain ones for the first thousand."""
    if seed < 1000:
        return Net().double(), loss_of
    chosen = random.Random(seed + 7)
    loss = chosen.choice([*LOSSES, lambda: loss_of])()
    return chosen.choice(MODELS)().double(), loss


def set_globals(scale: float) -> None:
    global SCALE
    SCALE = scale
    LOG.clear()
    SEEN.clear()
    KNOB.__dict__.update(scale=1.0, values=[1.0, 2.0], table={"scale": 1.0}, fails=False)


class Halving(torch.amp.GradScaler):
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)


class Own(torch.optim.Optimizer):
    """An optimizer of a user's own; `update` does the work for one parameter."""

    factor = 1.0

    def __init__(self, parameters: Any, update: Callable[..., None]) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0.0})
        self.own_scale, self.counts, self.update = 1.0, [0], update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(self, p, group, self.state[p])


def reads_global(o: Any, p: Any, g: Any, s: Any) -> None:
    p.sub_(p.grad, alpha=g["lr"] * SCALE)


def appends(o: Any, p: Any, g: Any, s: Any) -> None:
    LOG.append(len(LOG))
    p.sub_(p.grad, alpha=g["lr"])


def draws(o: Any, p: Any, g: Any, s: Any) -> None:
    p.sub_(p.grad, alpha=g["lr"] * random.random())


def _counts(o: Any, p: Any, g: Any, s: Any) -> None:
    s["n"] = s.get("n", 0) + 1
    g["count"] += 1.0
    s["mean"] = s["mean"] * 0.9 + p.grad if "mean" in s else p.grad.clone()
    p.sub_(s["mean"], alpha=g["lr"] / s["n"] ** 0.5)


def _divides(o: Any, p: Any, g: Any, s: Any) -> None:
    s["n"] = s.get("n", 1) / 2 if s.get("n", 1) != 0 else 1
    p.sub_(p.grad, alpha=g["lr"] * s["n"])


def _swaps(o: Any, p: Any, g: Any, s: Any) -> None:
    if not s:
        s["a"], s["b"] = torch.zeros_like(p), torch.ones_like(p)
    s["a"], s["b"] = s["b"], s["a"]
    s["a"].mul_(0.5).add_(p.grad)
    p.sub_(s["a"], alpha=g["lr"])


def _shares(o: Any, p: Any, g: Any, s: Any) -> None:
    if not s:
        s["a"], s["b"] = torch.zeros_like(p), torch.ones_like(p)
    s["a"].mul_(0.5)
    p.sub_(p.grad + s["b"] * 0.01, alpha=g["lr"])
    s["b"] = s["a"]
    s["a"].add_(1.0)


def _numbers(o: Any, p: Any, g: Any, s: Any) -> None:
    if not s:
        s["t"], s["u"] = torch.tensor(0.0), torch.tensor(-1.0, dtype=torch.float64)
    s["t"] += 1
    s["u"] = torch.maximum(s["u"] * 2, s["t"].double() / (s["t"] - 2).double()).clone()
    s["v"] = (s["t"] - 3.0).sqrt().clone()
    s["w"] = torch.minimum(s["u"], s["v"].double()).clone()
    s["x"] = ((s["t"] - 4.0) ** 1.5 + s["t"] % -1.5).clone()
    p.sub_(p.grad, alpha=g["lr"])


def _exponential(o: Any, p: Any, g: Any, s: Any) -> None:
    if not s:
        s["t"] = torch.tensor(50.0)
    s["t"] *= 3
    s["e"] = torch.exp(s["t"]).clone()
    s["r"] = (1 / (s["e"] - s["e"])).clone()
    p.sub_(p.grad, alpha=g["lr"])


def _keeps_gradient(o: Any, p: Any, g: Any, s: Any) -> None:
    if "last" in s:
        p.sub_(s["last"], alpha=g["lr"] / 2)
    s["last"] = p.grad
    p.sub_(p.grad, alpha=g["lr"])


class Attribute(Own):
    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] * self.own_scale * self.factor)


class Counter(Own):
    def step(self, closure: Any = None) -> None:
        self.counts[0] += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] / self.counts[0])


class Decaying(torch.optim.SGD):
    decay = 0.99

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(self.decay)


class Noting(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        LOG.append("zero_grad")
        super().zero_grad(set_to_none)


def _own(update: Callable[..., None]) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: Own(parameters, update)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda ps: torch.optim.Adam(ps, 0.01),
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True, foreach=False),
    "tensor lr": lambda ps: torch.optim.Adam(ps, torch.tensor(0.01), foreach=False),
    "NAdam": lambda ps: torch.optim.NAdam(ps, 0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.01, momentum=0.5),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.05),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, 0.05),
    "Rprop": lambda ps: torch.optim.Rprop(ps, 0.01),
    "decaying": lambda ps: Decaying(ps, 0.1),
    "noting": lambda ps: Noting(ps, 0.1),
    "attribute": lambda ps: Attribute(ps, reads_global),
    "counter": lambda ps: Counter(ps, reads_global),
    **{
        f.__name__: _own(f)
        for f in (reads_global, appends, draws, _counts, _divides, _swaps, _shares, _numbers)
        + (_exponential, _keeps_gradient)
    },
}


# -- what clips ----------------------------------------------------------------------------------------------
def each(parameters: Any, factor: Any) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def _by_attribute(parameters: Any) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(getattr(p, "scale", 1.0))


def _noise(parameters: Any) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


def _if_large(parameters: Any) -> None:
    total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if total > 0.5:
        nn.utils.clip_grads_with_norm_(parameters, 0.5, total)


def _clip_of_default(parameters: Any, factor: float = 0.5) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def _copied(function: Any) -> Callable[..., None]:
    """A function of a world's own, which changes may change."""
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )


def _closure(world: World) -> Callable[[Any], None]:
    factor = 0.5

    def clip(parameters: Any) -> None:
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(factor)

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    world.change_closure = change  # type: ignore[attr-defined]
    return clip


CLIPS: dict[str, Callable[[World], Any]] = {
    "none": lambda w: None,
    "none again": lambda w: None,
    "number": lambda w: 0.3,
    "lambda": lambda w: lambda ps: nn.utils.clip_grad_norm_(ps, 0.3),
    "value": lambda w: lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.05),
    "cell": lambda w: (lambda cell: lambda ps: each(ps, cell[0]))(w.cell),
    "closure": _closure,
    "global": lambda w: lambda ps: each(ps, SCALE),
    "attribute": lambda w: lambda ps: nn.utils.clip_grad_norm_(ps, KNOB.scale),
    "item": lambda w: lambda ps: each(ps, KNOB.table["scale"]),
    "world": lambda w: lambda ps: each(ps, w.scale),
    "default": lambda w: _copied(_clip_of_default),
    "partial": lambda w: functools.partial(nn.utils.clip_grad_norm_, max_norm=0.3),
    "appends": lambda w: lambda ps: w.seen.append(nn.utils.clip_grad_norm_(ps, 1.0)),
    "counts": lambda w: lambda ps: LOG.append("clip"),
    "draws": lambda w: lambda ps: each(ps, random.random()),
    "noise": lambda w: _copied(_noise),
    "by attribute": lambda w: _copied(_by_attribute),
    "if large": lambda w: _copied(_if_large),
    "optimizer": lambda w: lambda ps: each(ps, w.optimizer.param_groups[0]["lr"]),
    "average": lambda w: lambda ps: _average(w, ps),
}


def _average(world: World, parameters: Any) -> None:
    if not world.seen:
        world.seen.append([p.detach().clone() for p in parameters])
    for held, p in zip(world.seen[0], parameters):
        held.lerp_(p.detach(), 0.1)


def plain(value: Any) -> Any:
    """A value as nested lists of numbers and names, with the types that a program may ask for."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), value.detach().double().tolist()
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
