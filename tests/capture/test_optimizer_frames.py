"""`optimizer.step()` inside a compiled function is a program of its own, between two graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor


@pytest.fixture(autouse=True)
def _fresh() -> None:
    dynamotor.reset()


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3).double()


def batch(k: int) -> torch.Tensor:
    return torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))


def both(
    make: Callable[[Any], torch.optim.Optimizer],
    update: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer.step(),
    before: Callable[[int, torch.optim.Optimizer], Any] = lambda k, optimizer: None,
    backend: Any = "aot_eager",
) -> None:
    """Train in eager and compiled; asserts equal parameters and state."""
    results = []
    for compiled in (False, True):
        model = net()
        optimizer = make(list(model.parameters()))

        def train(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            update(optimizer)
            optimizer.zero_grad()
            return loss.detach() * 2

        step = dynamotor.compile(train, backend=backend) if compiled else train
        losses = []
        for k in range(4):
            before(k, optimizer)
            losses.append(step(batch(k)))
        results.append([*losses, *model.parameters(), list(optimizer.state.values())])
    torch.testing.assert_close(results[1], results[0])


def share() -> int:
    return next(v for name, v in dynamotor.counters["compiled share"].items() if name.endswith("train"))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


@pytest.mark.regression
@pytest.mark.parametrize("make", [lambda ps: torch.optim.SGD(ps, lr=0.1), adam], ids=["SGD", "AdamW"])
def test_a_step_inside_is_one_program_from_the_first_call_on(make: Any) -> None:
    both(make, before=lambda k, optimizer: optimizer.param_groups[0].update(lr=0.1 / (k + 1)))
    assert (share(), dynamotor.counters["step"]["programs"]) == (100, 1)


@pytest.mark.regression
def test_a_backend_sees_the_whole_update() -> None:
    calls = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    both(adam, backend=backend)
    assert (
        "aten.pow.Tensor_Tensor" in calls and calls.count("aten.copy_.default") == 8
    )  # with the step counts


def add_and_remove(k: int, optimizer: torch.optim.Optimizer) -> None:
    if k == 2:
        other = torch.nn.Parameter(torch.ones(3))
        other.grad = torch.ones(3)
        optimizer.add_param_group({"params": [other], "lr": 0.2})
    if k == 3:
        optimizer.param_groups[0]["params"].pop()


@pytest.mark.regression
def test_parameters_that_are_added_and_removed_and_schedulers_inside() -> None:
    both(adam, before=add_and_remove)
    schedulers: dict[Any, Any] = {}

    def update(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        schedulers[optimizer].step()

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adam(parameters)
        schedulers[optimizer] = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return optimizer

    both(make, update)


@pytest.mark.regression
def test_hooks_run_around_the_program() -> None:
    seen: list[tuple[bool, float]] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            seen.append((k := len(seen) % 2 == 0, float(parameters[0].detach().sum())))
            parameters[0].grad.mul_(2 if k else 1)

        optimizer = adam(parameters)
        optimizer.register_step_pre_hook(hook)
        optimizer.register_step_post_hook(hook)
        return optimizer

    both(make)
    assert share() > 90 and len(seen) == 16
    torch.testing.assert_close(seen[8:], seen[:8])


@pytest.mark.regression
def test_closures_and_steps_behind_super() -> None:
    class Clamped(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for p in self.param_groups[0]["params"]:
                p.detach().clamp_(-0.3, 0.3)
            return result

    def closure(optimizer: Any) -> torch.Tensor:
        sum(p.square().sum() for p in optimizer.param_groups[0]["params"]).backward()
        return torch.ones(())

    both(lambda parameters: Clamped(parameters, lr=0.1))
    assert dynamotor.counters["step"]["programs"] == 1
    both(adam, lambda optimizer: optimizer.step(lambda: closure(optimizer)))
    assert dynamotor.counters["step"]["programs"] == 2


@pytest.mark.regression
def test_an_optimizer_made_at_each_call_is_not_compiled_for_ever() -> None:
    model = net()

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = dynamotor.compile(train, backend="aot_eager")
    for k in range(10):
        compiled(batch(k))
    assert dynamotor.counters["step"]["programs"] == 8


@pytest.mark.regression
def test_an_optimizer_that_was_compiled_is_freed() -> None:
    def made() -> list[Any]:
        model = net()
        optimizer = adam(model.parameters())

        def train(x: torch.Tensor) -> torch.Tensor:
            model(x).sum().backward()
            optimizer.step()
            return x + 1

        compiled(train)(batch(0))
        return [weakref.ref(optimizer), weakref.ref(model.weight)]

    def compiled(function: Any) -> Any:
        return dynamotor.compile(function, backend="aot_eager")

    found = made()
    gc.collect()
    assert [ref() for ref in found] == [None, None]
