"""Hooks on the nodes of a compiled graph's outputs see eager's gradients, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.errors import BackendError

X = torch.linspace(0.2, 1.1, 6, dtype=torch.float64).reshape(2, 3)


def one(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.sin() * w,)


def two(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.cos() * w, (x * w).exp()


def inner(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = x.sin()
    return hidden, hidden * w, (w * 2).exp()


def _compiled(f: Any) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    leaves = [X.clone().requires_grad_(), (X + 1).requires_grad_()]
    return f(*leaves), leaves


def _through(f: Any, output: int, used: slice) -> list[torch.Tensor | None]:
    outputs, leaves = _compiled(f)
    handle = outputs[output].grad_fn.register_prehook(lambda given: (given[0].square() + 1,))
    torch.autograd.backward([one.sin().sum() for one in outputs[used]])
    handle.remove()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(
    ("f", "output", "used"),
    [(one, 0, slice(1)), (two, 1, slice(2)), (inner, 1, slice(1, 3)), (inner, 0, slice(1))],
)
def test_a_hook_before_a_node(f: Any, output: int, used: slice) -> None:
    compiled = dynamotor.compile(f, backend="aot_eager")
    torch.testing.assert_close(_through(compiled, output, used), _through(f, output, used))


def test_a_hook_before_the_node_of_an_output_from_which_others_are_computed() -> None:
    """It would be told a part of the gradient, and its change would reach a part of it."""
    with pytest.raises(BackendError, match="DM403"):
        _through(dynamotor.compile(inner, backend="aot_eager"), 0, slice(3))


@pytest.mark.parametrize("f", [one, inner])
def test_a_hook_behind_a_node_is_refused(f: Any) -> None:
    outputs, _ = _compiled(dynamotor.compile(f, backend="aot_eager"))
    with pytest.raises(BackendError, match="DM283"):
        outputs[0].grad_fn.register_hook(lambda given, arrived: None)
