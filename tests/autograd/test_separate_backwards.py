"""Backwards of several outputs of one compiled graph, one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor


def _leaves() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def _two(a: Any, b: Any, w: Any) -> Any:
    return (a @ w).sin().sum(), ((b @ w) ** 2).tanh()


def _shared(a: Any, b: Any, w: Any) -> Any:
    hidden = (a @ w).sin()
    return hidden.exp().sum(), hidden.cos().sum()


def _adversarial(a: Any, b: Any, w: Any) -> Any:
    fake = (a @ b).tanh()
    return (fake.detach() @ w).sigmoid().sum(), (fake @ w).sigmoid().log().sum()


def _three(a: Any, b: Any, w: Any) -> Any:
    return (a * w).exp().sum(), (b * w).exp().sum(), (a * b).sin().sum()


def _linear(a: Any, b: Any, w: Any) -> Any:
    both = a + b
    return both.sum(), both.mean(), (both * w).sin().sum()


def _gradients(run: Callable[..., Any], order: list[Any]) -> Any:
    leaves = _leaves()
    outputs = run(*leaves)
    errors = []
    for step in order:
        numbers, keep = step if isinstance(step, tuple) else (step, False)
        numbers = numbers if isinstance(numbers, list) else [numbers]
        try:
            chosen = [outputs[k] for k in numbers]
            torch.autograd.backward(chosen, [torch.full_like(one, 0.5) for one in chosen], retain_graph=keep)
        except RuntimeError as error:
            errors.append(str(error)[:40])
    return errors, [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function, order",
    [
        (_two, [0, 1]),
        (_two, [1, 0]),
        (_two, [0, 0, 1, 1]),
        (_two, [(0, True), 0, 1]),
        (_two, [0, (1, True), 1, 1, 0]),
        (_shared, [0, 1]),
        (_adversarial, [0, 1]),
        (_adversarial, [1, 0, 1]),
        (_three, [1, 0, 2]),
        (_three, [[0, 2], 1, 0]),
        (_three, [1, [0, 2], 2]),
        (_linear, [0, 1, 0, 2, 1, 2]),
    ],
)
def test_backwards_one_after_the_other_do_as_eagers(
    function: Callable[..., Any], order: list[Any], dynamic: bool
) -> None:
    errors, gradients = _gradients(dynamotor.compile(function, dynamic=dynamic, fullgraph=True), order)
    expected_errors, expected = _gradients(function, order)
    assert errors == expected_errors
    for ours, eagers in zip(gradients, expected, strict=True):
        assert (ours is None) == (eagers is None)
        if eagers is not None:
            torch.testing.assert_close(ours, eagers)


def test_a_write_between_two_backwards_is_refused() -> None:
    a, b, w = _leaves()
    first, second = dynamotor.compile(_two, fullgraph=True)(a, b, w)
    first.backward()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()


def test_a_backward_frees_what_no_other_one_reads() -> None:
    a, b, w = _leaves()
    inputs = [a.detach().clone(), b.detach().clone()]
    memories = [weakref.ref(one.untyped_storage()) for one in inputs]
    first, second = dynamotor.compile(_two, fullgraph=True)(*inputs, w)
    del inputs
    first.backward()
    assert memories[0]() is None and memories[1]() is not None
    second.sum().backward()
    assert memories[1]() is None
