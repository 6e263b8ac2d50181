"""Tensors that a custom autograd function keeps on its context without saving them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.state = state
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * (1 + ctx.state), None


def _plain(x: Any, state: Any) -> Any:
    return _Keeps.apply(x * 2, state).exp()


def _uses_it_too(x: Any, state: Any) -> Any:
    return _Keeps.apply(x * 2, state) * state


def _view(x: Any, state: Any) -> Any:
    return _Keeps.apply(x[1:] * 2, state[1:]).exp()


def _writes_before(x: Any, state: Any) -> Any:
    state.mul_(2)
    return _Keeps.apply(x, state)


def _writes_behind(x: Any, state: Any) -> Any:
    y = _Keeps.apply(x, state)
    state.add_(1)
    return y


def _gradient(run: Callable[..., Any]) -> list[torch.Tensor]:
    found = []
    for k in range(3):
        x = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()
        state = torch.full((5,), float(k), dtype=torch.float64)
        y = run(x, state)
        state.add_(3)
        y.sum().backward()
        found.append(x.grad)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("function", [_plain, _writes_before, _writes_behind])
def test_a_backward_reads_a_tensor_on_its_context_as_it_is_then(function: Callable[..., Any]) -> None:
    torch.testing.assert_close(_gradient(dynamotor.compile(function)), _gradient(function))


@pytest.mark.parametrize("function", [_uses_it_too, _view])
def test_a_tensor_on_a_context_is_read_as_it_is_then_or_refused(function: Callable[..., Any]) -> None:
    try:
        expected = _gradient(function)
    except RuntimeError:
        expected = None
    try:
        found = _gradient(dynamotor.compile(function))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    assert expected is not None
    torch.testing.assert_close(found, expected)


HELD = torch.zeros((), dtype=torch.float64)


class _ReadsHeld(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.by = HELD
        return x * HELD

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.by


def test_a_tensor_that_is_no_argument_and_that_the_graph_wrote() -> None:
    """The recording took its contents from before the write."""

    def function(x: torch.Tensor) -> torch.Tensor:
        HELD.add_(1)
        return _ReadsHeld.apply(x * 2).sum()

    compiled, x = dynamotor.compile(function, backend="aot_eager"), torch.ones(3, dtype=torch.float64)
    for run, wanted in ((function, 6.0), (compiled, 12.0), (compiled, 18.0)):
        assert run(x.requires_grad_()).item() == wanted
