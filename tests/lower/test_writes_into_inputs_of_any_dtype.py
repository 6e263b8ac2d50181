"""Inputs changed in place whose dtype loop kernels do not have (complex, wide unsigned, float8) could not be
compiled.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

DTYPES = (torch.complex64, torch.uint16, torch.uint64, torch.float8_e5m2)


def swapped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each takes the other's value; the old one of x is returned."""
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return old


def turned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.copy_(x.t().clone())
    return y.t()


def from_another_dtype(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = y.to(torch.float32) if not y.is_complex() else y.real
    x.copy_(z + 1)
    return z * 2


def in_part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[1:].copy_(y[:2])
    return x


def into_floats(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    part = x.real if x.is_complex() else x
    z = torch.zeros(3, 3)
    z.copy_(part)
    return z + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fn", [swapped, turned, from_another_dtype, in_part, into_floats])
def test_writes_into_inputs(fn: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x, y = torch.arange(9).view(3, 3).to(dtype), (torch.arange(9).view(3, 3) * 3).to(dtype)
    eager, ours = (x.clone(), y.clone()), (x.clone(), y.clone())
    wanted, found = fn(*eager), dynamotor.compile(fn)(*ours)
    assert found.stride() == wanted.stride()
    for want, got in zip((wanted, *eager), (found, *ours), strict=True):
        exact = torch.complex128 if want.is_complex() else torch.float64
        assert got.dtype == want.dtype and torch.equal(got.to(exact), want.to(exact))


def test_order_of_writes_and_reads() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = (x @ y).abs()
        x.mul_(2j)
        y.add_(x)
        return before, (x @ y).real.sin()

    x, y = torch.randn(4, 4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.complex64)
    eager, ours = (x.clone(), y.clone()), (x.clone(), y.clone())
    torch.testing.assert_close(dynamotor.compile(step)(*ours), step(*eager))
    torch.testing.assert_close(ours, eager)
    assert ours[0]._version > 0
