"""An integer that differs between calls indexes tensors without a program for each number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters


def get(x: torch.Tensor, j: int) -> Any:
    return x[j] * 2


def from_the_end(x: torch.Tensor, j: int) -> Any:
    return x[-j] * 2


def put(x: torch.Tensor, j: int) -> Any:
    y = x * 1
    y[j] = x[j] + 1
    return y


def two(x: torch.Tensor, j: int) -> Any:
    return x[j, j - 1] + x[j][j]


def among_others(x: torch.Tensor, j: int) -> Any:
    return x[None, j, ..., :2] + x[..., j, None] + x[1, ..., j] * x[2:4, j, None].sum()


def into_places(x: torch.Tensor, j: int) -> Any:
    y = x.clone()
    y[..., j] = x[j]
    y[j, 1:] += 2
    y[:, j] = 3.0
    y[j] = torch.ones(1, 1, 1)
    return y


def writes_a_view(x: torch.Tensor, j: int) -> Any:
    y = x * 1
    v = y[j]
    v.mul_(2)
    return y, v


def of_more_dimensions(x: torch.Tensor, j: int) -> Any:
    y = x[..., None, :]
    return y[j, None, 0, ..., j - 2]


def outside(x: torch.Tensor, j: int) -> Any:
    try:
        return x[j + 3]
    except IndexError as error:
        return x * 2, str(error)


def masks_beside(x: torch.Tensor, j: int) -> Any:
    return x[j, [True, False, True, False, True, False]], x[j, True], x[[j, 0]]


FUNCTIONS = [
    get, from_the_end, put, two, among_others, into_places, writes_a_view, of_more_dimensions, outside, masks_beside,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_indexes(function: Callable[..., Any], backend: str) -> None:
    compiled = dynamotor.compile(function, backend=backend)
    x = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6).requires_grad_()
    for j in (2, 3, 4, 5, 1, -1, -2, 0, 2):
        got, want = compiled(x, j), function(x, j)
        for a, b in zip(*[r if isinstance(r, tuple) else (r,) for r in (got, want)], strict=True):
            if isinstance(b, str):
                assert a == b
                continue
            torch.testing.assert_close(a, b)
            weights = torch.arange(b.numel()).reshape(b.shape)
            grads = [torch.autograd.grad((r * weights).sum(), x, retain_graph=True) for r in (a, b)]
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize("function", FUNCTIONS[:-2], ids=lambda f: f.__name__)
def test_one_program_serves_them(function: Callable[..., Any]) -> None:
    compiled = dynamotor.compile(function, backend="eager")
    before = counters["capture"]["graphs"]
    for j in range(2, 12):
        compiled(torch.ones(12, 12), j)
    assert counters["capture"]["graphs"] - before <= 3
