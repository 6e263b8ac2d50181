"""Outputs that view an input or each other and need no gradient were cut off from it: a later write gave it
no history.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.ones(4, 4),
    "a view of a base without gradient": lambda: torch.ones(5, 4)[1:],
    "a view that became a leaf": lambda: torch.ones(5, 4)[1:].requires_grad_(),
    "a view in a graph": lambda: torch.ones(5, 4).requires_grad_().mul(1)[1:],
    "a detached view": lambda: torch.ones(5, 4).requires_grad_().detach()[1:],
}


def in_no_grad(x: torch.Tensor) -> tuple:
    v = x[0]
    with torch.no_grad():
        w = v[1:]
    return v, w, w[1:]


def detached_on_the_way(x: torch.Tensor) -> tuple:
    v = x[0].detach()
    return v, v[1:], x[1]


def of_new_memory(x: torch.Tensor) -> tuple:
    with torch.no_grad():
        y = x.t() * 2
    return y[0], y[0:2], y.detach()[1]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("f", [in_no_grad, detached_on_the_way, of_new_memory], ids=lambda f: f.__name__)
def test_outputs_are_the_views_that_eager_gives(f: Callable, maker: str) -> None:
    def seen(f: Callable) -> list:
        x = MAKERS[maker]()
        return [
            (t.requires_grad, t.is_leaf, t._is_view(), t._is_view() and (t._base is x or t._base is x._base))
            for t in f(x)
        ]

    assert seen(dynamotor.compile(f, backend="aot_eager")) == seen(f)


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_a_write_into_an_output_reaches_what_it_is_a_view_of(backend: str) -> None:
    def run(first: Callable, second: Callable) -> list:
        x, p = (
            torch.ones(4, 4, dtype=torch.float64),
            torch.full((4,), 3.0, dtype=torch.float64, requires_grad=True),
        )
        first(x).copy_(p)
        one, both, apart = second(x.detach().clone())
        one.mul_(p)
        apart.add_(1)
        (x.sum() + both.sum()).backward()
        return [x.requires_grad, both.requires_grad, apart.requires_grad, p.grad]

    def row(x: torch.Tensor) -> torch.Tensor:
        return x[1]

    expected = run(row, of_new_memory)
    got = run(dynamotor.compile(row, backend=backend), dynamotor.compile(of_new_memory, backend=backend))
    assert got[:3] == expected[:3] == [True, True, False] and torch.equal(got[3], expected[3])


def test_a_library_calls_view_may_be_written_by_the_user():
    """`conv1d` gives a view of the result of a 2-d convolution: new memory to the caller."""
    x = torch.randn(1, 3, 5, requires_grad=True)
    y = dynamotor.compile(lambda x: torch.nn.functional.conv1d(x, torch.ones(3, 3, 1)))(x)
    y.add_(1).sum().backward()
    assert torch.equal(x.grad, torch.full((1, 3, 5), 3.0))


def test_a_view_that_autograd_refuses_to_read_is_handed_on() -> None:
    base = torch.ones(4, requires_grad=True) * 1
    with torch.no_grad():
        view = base.view(2, 2)
    base.mul_(2)
    seen = [view]

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x * 2

    assert torch.equal(dynamotor.compile(f)(torch.ones(3)), torch.full((3,), 2.0)) and len(seen) == 2


def rows_then_a_write(x: torch.Tensor) -> tuple:
    first, second = x.unbind(0)
    x.relu_()
    return first, second[1:]


def a_row_then_a_write(x: torch.Tensor) -> tuple:
    row = x[0]
    x.relu_()
    return row, x[1]


def writes_through_a_row(x: torch.Tensor) -> tuple:
    row = x[0]
    row.relu_()
    x.add_(1)
    return row, row[:1], x[:, 1]


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("function", [rows_then_a_write, a_row_then_a_write, writes_through_a_row])
def test_a_view_knows_that_it_is_older_than_a_write(function, backend):
    """61002:4315 of the fuzzer. Gradients begin on the written tensor later: eager asks whether a view of it is as
    old as the write."""
    found = []
    for run in (function, dynamotor.compile(function, backend=backend)):
        x = torch.arange(-4.0, 4.0).view(2, 4).clone()
        views = run(x)
        x.requires_grad_()
        found.append([x.tolist()])
        for view in views:
            try:
                found[-1] += [view.is_leaf, view.grad_fn is not None and view.grad_fn.name(), view.tolist()]
            except RuntimeError as error:
                found[-1].append(str(error))
    assert found[0] == found[1]
