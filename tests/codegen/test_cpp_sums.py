"""Sums of many equal floats are as exact as eager's: additions into one accumulator that round in one direction
made them wrong by up to 4e-4, for which a default `assert_close` fails.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

ROWS = (33, 512, 10_007)
PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: x.sum(0),
    "columns, and what follows": lambda x: (x * 2).mean(0) + 1,
    "rows": lambda x: x.t().contiguous().sum(1),
    "everything": lambda x: x.sum(),
    "the middle of three": lambda x: x.expand(3, *x.shape).contiguous().sum(1),
    "rows of short rows": lambda x: x[:, :3].contiguous().view(-1, 3).sum((0, 1)),
    "two dimensions that are not adjacent": lambda x: (
        x.view(x.shape[0], 5, 4).transpose(0, 1).contiguous().sum((1, 2))
    ),
    "a squared norm": lambda x: x.square().sum(0).sqrt(),
    "across rows that are reduced too": lambda x: (x / x.sum(1, keepdim=True)).sum(0),
    "halves": lambda x: x.bfloat16().to(x.dtype).sum(0),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("isa", "dynamic"), [("", False), ("portable", True)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_exact(name: str, dynamic: bool, isa: str) -> None:
    f = PROGRAMS[name]
    with dynamotor.config.patch(isa=isa):
        compiled = dynamotor.compile(f, dynamic=dynamic)
        for rows in ROWS:
            x = (torch.arange(20) / 37 + 0.1).expand(rows, 20).contiguous()
            torch.testing.assert_close(compiled(x).double(), f(x.double()), rtol=1e-6, atol=0)


def test_the_gradient_of_a_scale_that_many_rows_share() -> None:
    norm = torch.nn.LayerNorm(20)
    x = (torch.arange(20.0) / 37).expand(10_007, 20).contiguous()
    found = torch.autograd.grad(dynamotor.compile(norm)(x).sum(), list(norm.parameters()))
    wanted = torch.autograd.grad(norm.double()(x.double()).sum(), list(norm.parameters()))
    torch.testing.assert_close([g.double() for g in found], list(wanted), rtol=2e-6, atol=1e-3)


@pytest.mark.parametrize("odd", [float("inf"), -float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_not_finite_stays(odd: float, dim: int) -> None:
    x = torch.ones(5000, 40)
    x[70, 3] = odd
    x[4000, 3] = x[70, 30] = odd
    f = lambda x: x.sum(dim)  # noqa: E731
    torch.testing.assert_close(dynamotor.compile(f)(x), f(x), equal_nan=True)


def test_strips_of_rows_and_of_their_elements_in_one_kernel() -> None:
    """The verifier took the end of one for that of the other, and refused the kernel."""
    x = torch.randint(-9, 10, (2, 128))
    found, rows = dynamotor.compile(lambda x: ((y := x.sigmoid()).mean((0, 1)), y))(x)
    torch.testing.assert_close((found, rows), (x.sigmoid().mean(), x.sigmoid()))
