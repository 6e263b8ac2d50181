"""Objects that the Python of an update looks up are guarded or runs at each step; its effects happen at each step."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynamotor

SCALE = 1.0
SETTINGS = types.SimpleNamespace(scale=1.0, table={"scale": 1.0}, row=[1.0])
LOG: list[Any] = []


def each(parameters: Any, factor: float) -> None:
    for p in parameters:
        p.grad.mul_(factor)


def trained(
    compiled: bool,
    make: Callable[[Any], torch.optim.Optimizer],
    clip: Callable[[torch.optim.Optimizer], Any] = lambda o: None,
    change: Callable[[int, nn.Module, torch.optim.Optimizer], None] = lambda k, m, o: None,
    scaler: Any = None,
) -> tuple[list[torch.Tensor], Any]:
    """The weights after six steps, with a change before each; and the compiled step."""
    global SCALE
    SCALE, SETTINGS.scale, SETTINGS.table["scale"], SETTINGS.row[0] = 1.0, 1.0, 1.0, 1.0
    LOG.clear()
    random.seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = make(list(net.parameters()))
    clipped, step = clip(optimizer), None
    scaled = None if scaler is None else scaler("cpu", init_scale=16.0)
    if compiled:
        step = dynamotor.compile_step(
            net, nn.functional.mse_loss, optimizer, clip=clipped, scaler=scaled, backend="aot_eager"
        )
    for k in range(6):
        change(k, net, optimizer)
        x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
        if step is not None:
            step(x, y)
            continue
        loss = nn.functional.mse_loss(net(x), y)
        (loss if scaled is None else scaled.scale(loss)).backward()
        if scaled is not None:
            scaled.unscale_(optimizer)
        if clipped is not None:
            clipped([p for group in optimizer.param_groups for p in group["params"]])
        if scaled is None:
            optimizer.step()
        else:
            scaled.step(optimizer)
            scaled.update()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()], step


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def check(*args: Any, **kwargs: Any) -> Any:
    expected, _ = trained(False, *args, **kwargs)
    log = list(LOG)
    found, step = trained(True, *args, **kwargs)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert log == LOG
    return step


def programs(step: Any) -> int:
    return sum(len(found) for graph in step.graphs for found in graph.programs.values())


def set_global(value: float) -> None:
    global SCALE
    SCALE = value


CHANGED: dict[str, tuple[Callable[[Any], Any], Callable[[float], Any]]] = {
    "a global": (lambda o: lambda ps: each(ps, SCALE), set_global),
    "an attribute": (lambda o: lambda ps: each(ps, SETTINGS.scale), lambda v: setattr(SETTINGS, "scale", v)),
    "an item": (
        lambda o: lambda ps: each(ps, SETTINGS.table["scale"]),
        lambda v: SETTINGS.table.update(scale=v),
    ),
    "a row": (
        lambda o: lambda ps: nn.utils.clip_grad_norm_(ps, SETTINGS.row[0] / 10),
        lambda v: SETTINGS.row.__setitem__(0, v),
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_constant_that_clip_looks_up_is_guarded(name: str) -> None:
    clip, change = CHANGED[name]
    step = check(sgd, clip, lambda k, m, o: change(2.0) if k == 3 else None)
    assert not step.reasons and programs(step) == 2


@pytest.mark.parametrize("name", CHANGED)
def test_a_constant_that_changes_at_each_step_is_left_to_eager(name: str) -> None:
    clip, change = CHANGED[name]
    step = check(sgd, clip, lambda k, m, o: change(1.0 + k))
    assert [code for code, _ in step.reasons] == ["DM511"] and programs(step) == 2


def test_defaults_and_partials() -> None:
    def clip(parameters: Any, factor: float = 0.5) -> None:
        each(parameters, factor)

    def change(k: int, model: Any, optimizer: Any) -> None:
        clip.__defaults__ = (0.5 if k < 3 else 2.0,)

    assert programs(check(sgd, lambda o: clip, change)) == 2
    partial = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.1)

    def keyword(k: int, model: Any, optimizer: Any) -> None:
        partial.keywords["max_norm"] = 0.1 if k < 3 else 0.01

    assert programs(check(sgd, lambda o: partial, keyword)) == 2


LEFT: dict[str, Callable[[Any], Any]] = {
    "draws": lambda o: lambda ps: each(ps, random.random()),
    "appends": lambda o: lambda ps: LOG.append(len(LOG)),
    "keeps norms": lambda o: lambda ps: LOG.append(float(nn.utils.clip_grad_norm_(ps, 1.0))),
    "an object": lambda o: Clipper(),
    "a method": lambda o: Clipper().clip,
    "attributes of parameters": lambda o: lambda ps: [setattr(p, "seen", 1) for p in ps],
    "exec": lambda o: lambda ps: exec("LOG.append(1)"),
    "a generator": lambda o: lambda ps: [LOG.append(n) for n in counting()],
}


def counting() -> Any:
    yield len(LOG)


class Clipper:
    def __init__(self) -> None:
        self.calls = 0

    def clip(self, parameters: Any) -> None:
        self.calls += 1
        each(parameters, 1.0 / self.calls)

    __call__ = clip


@pytest.mark.parametrize("name", LEFT)
def test_what_no_guard_can_follow_runs_at_each_step(name: str) -> None:
    step = check(sgd, LEFT[name])
    assert [code for code, _ in step.reasons] == ["DM510"] and not programs(step)
    assert "DM510" in step.explain()


class Own(torch.optim.Optimizer):
    rate = 1.0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.own = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.move(p, group["lr"] * self.rate * self.own)

    def move(self, p: torch.Tensor, rate: float) -> None:
        p.sub_(p.grad, alpha=rate)


class Double(Own):
    def move(self, p: torch.Tensor, rate: float) -> None:
        super().move(p, rate * 2)


def further(self: Any, p: torch.Tensor, rate: float) -> None:
    p.sub_(p.grad, alpha=rate * 3)


OF_OPTIMIZERS: dict[str, Callable[[Any], None]] = {
    "an attribute": lambda o: setattr(o, "own", 3.0),
    "an attribute of the class": lambda o: setattr(Own, "rate", 3.0),
    "a method of the class": lambda o: setattr(Own, "move", further),
    "a method of the instance": lambda o: setattr(o, "move", functools.partial(further, o)),
    "step": lambda o: setattr(o, "step", lambda closure=None: LOG.append("step")),
    "the class": lambda o: setattr(o, "__class__", Own),
    "zero_grad": lambda o: setattr(o, "zero_grad", lambda set_to_none=True: LOG.append("zero")),
}


@pytest.mark.parametrize("cls", [Own, Double], ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", OF_OPTIMIZERS)
def test_an_optimizer_of_the_users_that_is_changed(
    name: str, cls: type[Own], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(k: int, model: Any, optimizer: Any) -> None:
        if k == 0:
            Own.rate, Own.move = 1.0, before  # type: ignore[method-assign]
        if k == 3:
            OF_OPTIMIZERS[name](optimizer)

    before = Own.move
    monkeypatch.setattr(Own, "rate", 1.0)
    monkeypatch.setattr(Own, "move", before)
    assert programs(check(cls, change=change)) >= 1


def test_methods_of_pytorchs_optimizers_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(k: int, model: Any, optimizer: Any) -> None:
        monkeypatch.undo()
        if k >= 3:
            monkeypatch.setattr(
                sys.modules["torch.optim.sgd"], "sgd", lambda params, *args, **kwargs: LOG.append(len(params))
            )

    step = check(sgd, change=change)
    assert [code for code, _ in step.reasons] == ["DM510"]


@pytest.mark.parametrize("make", [sgd, lambda ps: torch.optim.Adam(ps, 0.05)], ids=["SGD", "Adam"])
@pytest.mark.parametrize(
    "change",
    [
        lambda m, o: o.param_groups[0]["params"].pop(0),
        lambda m, o: o.param_groups[0]["params"].reverse(),
        lambda m, o: o.param_groups[0].update(params=[m[2].bias]),
        lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
        lambda m, o: o.param_groups.append({**o.param_groups[0], "params": o.param_groups[0]["params"][:1]}),
        lambda m, o: o.state.clear(),
        lambda m, o: setattr(m[2], "bias", nn.Parameter(torch.ones(2, dtype=torch.float64))),
        lambda m, o: setattr(m[0].weight, "data", m[0].weight.data * 2),
    ],
    ids=["pop", "reverse", "replace", "group", "twice", "clear", "module", "data"],
)
def test_parameters_and_state_that_are_replaced(make: Any, change: Callable[[Any, Any], Any]) -> None:
    def at_three(k: int, model: Any, optimizer: Any) -> None:
        if k == 3:
            change(model, optimizer)
        model.zero_grad()

    check(make, change=at_three)


class Halving(torch.amp.GradScaler):
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        each(optimizer.param_groups[0]["params"], 0.5)


def test_a_scaler_of_the_users() -> None:
    assert check(sgd, scaler=Halving).reasons[0][0] == "DM510"
    assert not check(sgd, scaler=torch.amp.GradScaler).reasons


class Swapping(torch.optim.Optimizer):
    """Two states that change places, or become one."""

    def __init__(self, parameters: Any, share: bool) -> None:
        super().__init__(parameters, {"lr": 0.1, "share": share})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["a"], state["b"] = torch.zeros_like(p), torch.ones_like(p)
                if group["share"]:
                    state["a"].add_(p.grad)
                    p.sub_(state["b"], alpha=group["lr"])
                    state["b"] = state["a"]
                else:
                    state["a"], state["b"] = state["b"], state["a"]
                    state["a"].mul_(0.5).add_(p.grad)
                    p.sub_(state["a"], alpha=group["lr"])


def test_states_that_change_places() -> None:
    assert not check(lambda ps: Swapping(ps, False)).reasons
    assert check(lambda ps: Swapping(ps, True)).reasons[0][0] == "DM505"


class Numbers(torch.optim.Optimizer):
    """Numbers that divide by zero, overflow and become NaN, as tensors and as Python's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["t"], state["n"] = torch.tensor(0.0), 0
                state["t"] += 1
                state["n"] += 1
                try:
                    rate = group["lr"] / (state["n"] - 3)
                except ZeroDivisionError:
                    rate = group["lr"]
                odd = torch.maximum(1 / (state["t"] - 3), (state["t"] - 4).sqrt())
                state["odd"] = torch.minimum(odd, torch.exp(state["t"] * 40)).clone()
                p.sub_(p.grad, alpha=rate)


def test_numbers_are_those_of_aten() -> None:
    seen: list[list[float]] = []
    for compiled in (False, True):
        values: list[float] = []
        trained(
            compiled,
            Numbers,
            change=lambda k, m, o, values=values: values.extend(
                [float(o.state[m[2].bias]["odd"])] if o.state else []
            ),
        )
        seen.append(values)
    assert str(seen[0]) == str(seen[1])
    assert not check(Numbers).reasons


def halves(self: Any, p: Any, group: Any, state: Any) -> None:
    state["n"] = state.get("n", 8) / 2
    p.sub_(p.grad, alpha=group["lr"] * state["n"])


def asks_identity(self: Any, p: Any, group: Any, state: Any) -> None:
    p.sub_(p.grad, alpha=group["lr"] * (1.0 if group["lr"] is group["base"] else 2.0))


def asks_type(self: Any, p: Any, group: Any, state: Any) -> None:
    p.sub_(p.grad, alpha=group["lr"] * (1.0 if isinstance(group["lr"], float) else 2.0))


def matches(self: Any, p: Any, group: Any, state: Any) -> None:
    match group["lr"]:
        case float():
            factor = 1.0
        case _:
            factor = 2.0
    p.sub_(p.grad, alpha=group["lr"] * factor)


def catches(self: Any, p: Any, group: Any, state: Any) -> None:
    try:
        factor = float(p.grad.norm())
    except Exception:
        factor = 100.0
    p.sub_(p.grad, alpha=group["lr"] * factor)


def counts(self: Any, p: Any, group: Any, state: Any) -> None:
    state["n"] = state.get("n", 0) + 1
    p.sub_(p.grad, alpha=group["lr"] / state["n"])


class Updating(torch.optim.Optimizer):
    """Of a user's own, with a function that updates one parameter."""

    def __init__(self, parameters: Any, update: Callable[..., None]) -> None:
        super().__init__(parameters, {"lr": 0.1, "base": 0.1})
        self.param_groups[0]["base"] = self.param_groups[0]["lr"]
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(self, p, group, self.state[p])


@pytest.mark.parametrize("update", [halves, asks_identity, asks_type, matches, catches, counts])
def test_stand_ins_for_numbers_are_not_seen(update: Callable[..., None]) -> None:
    """What asks a number for its type or identity runs at each step; an int that becomes a float is one."""
    kept = []

    def change(k: int, model: Any, optimizer: Any) -> None:
        kept.append({id(p): dict(s) for p, s in optimizer.state.items()})
        if k == 3:
            for state in optimizer.state.values():
                state["n"] = 6

    check(lambda ps: Updating(ps, update), change=change)
    eager, ours = ([list(one.values()) for one in part] for part in (kept[:6], kept[6:]))
    assert repr(eager) == repr(ours)


def test_an_update_alone_gives_what_step_gives() -> None:
    class Telling(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            return 5

    weight = nn.Parameter(torch.ones(3))
    update = dynamotor.compile(Telling([weight], 0.1).step)
    for _ in range(3):
        weight.grad = torch.ones(3)
        assert update() == 5


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_the_update_sees_what_the_forward_has_changed() -> None:
    seen: list[int] = []
    net = Counted(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = dynamotor.compile_step(
        net, nn.functional.mse_loss, optimizer, clip=lambda ps: seen.append(net.calls), backend="aot_eager"
    )
    for _ in range(3):
        step(torch.ones(4, 3), torch.ones(4, 2))
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("how", ["fullgraph", "config", "options"])
def test_a_step_in_pieces_is_an_error_under_strict(how: str) -> None:
    def step(model: nn.Module, clip: Any) -> Any:
        optimizer = sgd(model.parameters())
        more = {"fullgraph": how == "fullgraph", "options": {"strict": True} if how == "options" else None}
        return dynamotor.compile_step(
            model, nn.functional.mse_loss, optimizer, clip=clip, backend="aot_eager", **more
        )

    def draws(parameters: Any) -> None:
        each(parameters, random.random())

    class Breaks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print(end="")
            return super().forward(x)

    batch = torch.ones(2, 3), torch.ones(2, 2)
    with dynamotor.config.patch(strict=how == "config"):
        for model, clip, why in ((nn.Linear(3, 2), draws, "DM510"), (Breaks(3, 2), None, "DM508")):
            compiled = step(model, clip)
            for call in range(3):
                if call == 0 and clip is not None:
                    compiled(*batch)  # in which the optimizer makes its state
                    continue
                with pytest.raises(dynamotor.CaptureError, match="DM520") as caught:
                    compiled(*batch)
                assert why in str(caught.value)
        compiled = step(nn.Linear(3, 2), 1.0)
        for _ in range(3):
            compiled(*batch)
        assert compiled.reasons == []
