"""Parameters and modules that a function makes or copies: eager's results, gradients and identities, in one graph;
what shares memory with a new parameter breaks it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor.base.events import counters

SOURCE = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.same, self.weight_too, self.numbers = self.inner, self.inner.weight, {"a": [1, 2]}
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.inner(x) * self.count * self.numbers["a"][1]


TIED = Tied()


def parameter(x: torch.Tensor) -> Any:
    p = nn.Parameter(torch.ones(6))
    return x * p, p, isinstance(p, nn.Parameter), p.requires_grad, p.is_leaf, p.grad_fn is None


def frozen(x: torch.Tensor) -> Any:
    p = nn.Parameter(torch.zeros(3), requires_grad=False)
    return p, p + 1


def module(x: torch.Tensor) -> Any:
    made = nn.Linear(6, 3)
    return made(x), made


def copied(x: torch.Tensor) -> Any:
    made = copy.deepcopy(SOURCE)
    return made(x), made


def tied(x: torch.Tensor) -> Any:
    made = copy.deepcopy(TIED)
    return made(x), made, made.same is made.inner, made.weight_too is made.inner.weight, TIED.count.clone()


def copy_of_a_new_one(x: torch.Tensor) -> Any:
    first = nn.Linear(6, 2)
    second = copy.deepcopy(first)
    return first(x) + second(x), first, second


def cut(x: torch.Tensor) -> Any:
    p = nn.Parameter(torch.ones(6))
    print(end="")
    return x * p, p


def written_under_it(x: torch.Tensor) -> Any:
    w = torch.ones(6)
    p = nn.Parameter(w)
    w.add_(1)
    return p * x


def handed_out_beside_it(x: torch.Tensor) -> Any:
    w = torch.ones(6)
    p = nn.Parameter(w)
    with torch.no_grad():
        p.add_(1)
    return p * x, w


def of_an_argument(x: torch.Tensor) -> Any:
    return nn.Parameter(x) * 2


def whole_numbers(x: torch.Tensor) -> Any:
    return nn.Parameter(torch.arange(3))


def views_of_one(x: torch.Tensor) -> Any:
    a = torch.arange(4.0)
    first, second = copy.deepcopy([a, a[1:]])
    first.add_(1)
    return first, second


def of_no_leaf(x: torch.Tensor) -> Any:
    return copy.deepcopy(x * 2)


def outcome(function: Callable[..., Any], seed: int) -> Any:
    torch.manual_seed(seed)
    x = torch.randn(5, 6, requires_grad=True)
    try:
        found = function(x)
    except Exception as error:
        return type(error).__name__, str(error)
    found = found if isinstance(found, tuple) else (found,)
    tensors = [value for value in found if isinstance(value, torch.Tensor)]
    graded = [value.sin().sum() * (k + 1) for k, value in enumerate(tensors) if value.requires_grad]
    if graded:
        sum(graded).backward()
    modules = [value for value in found if isinstance(value, nn.Module)]
    leaves = [v for v in tensors if v.is_leaf] + [p for m in modules for p in m.parameters()]
    return (
        [v.detach() for v in tensors],
        [(type(v), v.requires_grad, v.grad) for v in leaves],
        [dict(m.state_dict()) for m in modules],
        [value for value in found if isinstance(value, bool)],
        x.grad,
    )


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b)
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, dict):
        same(list(a.items()), list(b.items()))
    else:
        assert a == b


ONE = (parameter, frozen, module, copied, tied, copy_of_a_new_one)
BROKEN = (
    cut,
    written_under_it,
    handed_out_beside_it,
    of_an_argument,
    whole_numbers,
    views_of_one,
    of_no_leaf,
)


@pytest.mark.parametrize("function", [*ONE, *BROKEN])
def test_as_in_eager(function: Callable[..., Any]) -> None:
    counters.clear()
    compiled = dynamotor.compile(function, backend="eager")
    for seed in range(2):
        same(outcome(compiled, seed), outcome(function, seed))
    assert (counters["capture"]["graphs"] == 1 and not counters["breaks"]) or function in BROKEN


@pytest.mark.parametrize("function", [parameter, copied])
def test_compiled(function: Callable[..., Any]) -> None:
    with dynamotor.config.patch(fallback_random=True):
        compiled = dynamotor.compile(function)
        for seed in range(2):
            same(outcome(compiled, seed), outcome(function, seed))


def test_each_call_has_its_own() -> None:
    compiled = dynamotor.compile(module, backend="eager")
    first, second = compiled(torch.ones(2, 6))[1], compiled(torch.ones(2, 6))[1]
    assert first.weight is not second.weight and first.weight.data_ptr() != second.weight.data_ptr()


@pytest.mark.regression
@pytest.mark.parametrize("how", ["argument", "no_grad", "returned"])
def test_a_leaf_that_is_made_inside_gathers_its_gradient(how):
    """It was an output of the compiled graph, and its gradient None."""

    def fn(w):
        leaf = torch.ones(2, requires_grad=True)
        with torch.set_grad_enabled(how != "no_grad"):
            out = leaf * w
        out = out + leaf
        if how != "returned":
            out.sum().backward()
        return leaf, out

    grads = []
    for run in (fn, dynamotor.compile(fn, backend="aot_eager")):
        w = torch.tensor([2.0, 3.0], requires_grad=True)
        leaf, out = run(w)
        if how == "returned":
            out.sum().backward()
        assert leaf.is_leaf and leaf.requires_grad
        grads.append([leaf.grad, w.grad])
    assert str(grads[0]) == str(grads[1])
