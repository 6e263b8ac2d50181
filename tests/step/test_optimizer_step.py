"""`dynamotor.compile(optimizer.step)`: one program, and the numbers of the eager loop."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.step import optimizer_step


class Averaging(torch.optim.Optimizer):
    """What optimizers of others do with numbers: remainders, a sum that begins as zero, lists bounded by a number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.state["all"] = {"step": 0, "weights": 0.0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = self.state["all"]
        for group in self.param_groups:
            count["step"] += 1
            weight = (count["step"] - 1) * group["lr"]
            count["weights"] += weight
            try:
                share = weight / count["weights"]
            except ZeroDivisionError:
                share = 0.5
            if count["step"] % 3 == 0:
                share = share * 2
            grads = torch._foreach_maximum([p.grad for p in group["params"]], -0.5)
            for p, grad in zip(group["params"], torch._foreach_minimum(grads, 2.0)):
                p.add_(grad, alpha=-group["lr"] * share)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD with momentum": lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "AdamW maximize": lambda ps: torch.optim.AdamW(ps, lr=0.01, maximize=True),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.1),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.1),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "of a user": Averaging,
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


def train(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], Any],
    steps: int = 5,
    before: Callable[[int], None] = lambda k: None,
) -> None:
    """Train on fresh random batches, equal ones for equal numbers of steps."""
    for k in range(steps):
        before(k)
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        net(x).square().sum().backward()
        step()
        optimizer.zero_grad()


def both(
    make: Callable[[Any], torch.optim.Optimizer], **how: Any
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer, Any]:
    """Train twice, in eager and compiled; asserts equal parameters."""
    eager, compiled = model(), model()
    first, second = make(eager.parameters()), make(compiled.parameters())
    train(eager, first, first.step, **how)
    step = dynamotor.compile(second.step)
    train(compiled, second, step, **how)
    torch.testing.assert_close(list(compiled.parameters()), list(eager.parameters()))
    return first, second, step


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step_is_one_program_with_the_numbers_of_eager(name: str) -> None:
    first, second, step = both(OPTIMIZERS[name])
    assert not step.reasons, step.explain()
    assert step.explain().startswith(("1 program", "2 program", "3 program"))
    torch.testing.assert_close(second.state_dict()["state"], first.state_dict()["state"])


@pytest.mark.parametrize("first", ["scheduler", "compile", "compile in its place"])
def test_schedulers_and_settings_change_nothing_but_numbers(first: str) -> None:
    def trained(wrap: Callable[[Any], Any], first: str) -> tuple[torch.nn.Module, Any]:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        step = wrap(optimizer.step) if first != "scheduler" else None
        if first == "compile in its place":
            optimizer.step = step  # type: ignore[method-assign]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        step = step or wrap(optimizer.step)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a scheduler that saw no step would warn
            train(net, optimizer, lambda: (step(), scheduler.step()))
        return net, step

    eager, _ = trained(lambda step: step, "scheduler")
    compiled, step = trained(dynamotor.compile, first)
    torch.testing.assert_close(list(compiled.parameters()), list(eager.parameters()))
    assert step.explain().startswith("1 program")


def test_a_step_put_in_the_place_of_the_method_runs_once() -> None:
    eager, compiled = model(), model()
    first, second = (torch.optim.AdamW(net.parameters()) for net in (eager, compiled))
    second.step = dynamotor.compile(second.step)  # type: ignore[method-assign]
    train(eager, first, lambda: first.step())
    train(compiled, second, lambda: second.step())
    torch.testing.assert_close(list(compiled.parameters()), list(eager.parameters()))


def test_parameters_without_gradients_stay() -> None:
    def freeze(k: int) -> None:
        for net in nets:
            net[0].weight.requires_grad_(k % 2 == 0)
            net[2].requires_grad_(k != 3)

    nets: list[Any] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    eager, compiled = model(), model()
    nets[:] = [eager, compiled]
    first, second = make(eager.parameters()), make(compiled.parameters())
    train(eager, first, first.step, before=freeze)
    train(compiled, second, dynamotor.compile(second.step), before=freeze)
    torch.testing.assert_close(list(compiled.parameters()), list(eager.parameters()))


def test_gradients_of_other_strides_and_loaded_state_are_seen() -> None:
    results = []
    for wrap in (lambda step: step, dynamotor.compile):
        parameter = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
        optimizer = torch.optim.Adam([parameter], lr=0.1)
        step = wrap(optimizer.step)
        for k in range(6):
            grad = torch.linspace(-1, 1, 12).reshape(4, 3).t() if k % 2 else torch.ones(3, 4) * k
            parameter.grad = grad
            step()
            if k == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        results.append(parameter.detach())
    torch.testing.assert_close(*results)


def test_closures_and_shared_memory_are_left_to_eager() -> None:
    calls: list[str] = []
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    step = dynamotor.compile(optimizer.step)
    assert step(lambda: calls.append("closure") or torch.tensor(2.0)) == 2.0
    parameter.grad = parameter.detach()  # x -= x / 2
    step(), step(), step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.125))
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    parameter.grad = torch.ones(3)
    step(), step()
    assert calls == ["closure", "hook", "hook"]
    assert [code for code, _ in step.reasons] == ["DM521", "DM521"]


class Orthogonal(torch.optim.Optimizer):
    """Its update depends on PyTorch's modes: products (autocast) and new tensors (default dtype and device)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            g = p.grad.sign()
            g = g @ g.t() @ g.div(30) if p.dim() == 2 else g
            p.add_(g.to(p.dtype) * torch.full((), 0.1).add(1e-9), alpha=-0.1)


REGIONS: list[Callable[[], Any]] = [
    contextlib.nullcontext,
    lambda: torch.autocast("cpu", torch.bfloat16),
    torch.no_grad,
    torch.inference_mode,
    lambda: default_dtype(torch.float64),
    lambda: deterministic(),
    lambda: torch.device("cpu"),
]


@pytest.mark.parametrize("whole", [False, True], ids=["update", "whole step"])
def test_modes_that_differ_between_steps(whole: bool) -> None:
    def trained(compiled: bool) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        net = torch.nn.Linear(6, 5)
        optimizer = Orthogonal(list(net.parameters()))
        loss = torch.nn.functional.mse_loss
        step = dynamotor.compile(optimizer.step) if compiled else optimizer.step
        if whole and compiled:
            step = dynamotor.compile_step(net, loss, optimizer)
        for k, region in enumerate(REGIONS * 2):
            if whole and region in (torch.no_grad, torch.inference_mode):
                continue
            x, y = torch.randn(4, 11, generator=torch.Generator().manual_seed(k)).split((6, 5), 1)
            with region() if whole else contextlib.nullcontext():
                if whole and compiled:
                    step(x, y)
                    continue
                loss(net(x), y).backward()
            with region():
                step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in net.parameters()], step

    (found, step), (expected, _) = trained(True), trained(False)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert step.reasons == []


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_step_left_to_eager_is_an_error_under_fullgraph() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = dynamotor.compile(optimizer.step, fullgraph=True)
    train(net, optimizer, step)
    before = [p.detach().clone() for p in net.parameters()]
    for p in net.parameters():
        p.grad = p.detach()
    for _ in range(2):  # each time
        with pytest.raises(dynamotor.CaptureError, match="DM520.*SGD.step") as caught:
            step()
        assert "shares memory" in str(caught.value)
    torch.testing.assert_close(list(net.parameters()), before)
    with pytest.raises(dynamotor.CaptureError, match="DM520"):
        step(lambda: net(torch.ones(1, 6)).sum())


class Decaying(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            p.mul_(0.9)


def test_hooks_of_a_step_that_calls_another_one() -> None:
    """PyTorch puts hooks around the step of each class of which there is an optimizer."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    found = []
    for compiled in (False, True):
        weight, calls = torch.ones(3, requires_grad=True), list[str]()
        optimizer = Decaying([weight], lr=0.1)
        step = dynamotor.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for hooked in (False, True):
            if hooked:
                optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
            weight.grad = torch.full((3,), 0.5)
            step()
            calls.append("after")
        found.append((calls, weight.detach()))
    assert found[0][0] == found[1][0] == ["after", "before", "before", "after"]
    torch.testing.assert_close(found[1][1], found[0][1])


@pytest.mark.regression
def test_hooks_around_an_inherited_step_are_called_once() -> None:
    class Base(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            pass

    class Inherits(Base):
        pass

    class Calls(Base):
        def step(self, closure: Any = None) -> None:
            super().step(closure)

    parameters = [torch.ones(2)]
    inherits, calls, _ = (
        cls(parameters, {}) for cls in (Inherits, Calls, Base)
    )  # PyTorch puts hooks around each
    assert not optimizer_step._calls_hooks_again(inherits.step)
    assert optimizer_step._calls_hooks_again(calls.step)
