"""Variances of data far from zero are as accurate as eager's: the rounded mean's error is no part of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dynamotor

PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "var of columns": lambda x: x.var(0),
    "var of rows": lambda x: x.var(1, correction=0),
    "std of all": lambda x: x.std(),
    "var_mean": lambda x: torch.var_mean(x, 1)[0],
    "std_mean of a view": lambda x: torch.std_mean(x.view(8, -1, 4), (0, 2))[0],
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x.view(x.shape[0], 4, -1), 2),
    "instance_norm": lambda x: F.instance_norm(x.view(x.shape[0], 4, -1)),
    "cov": torch.cov,
}


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("offset", [0, 1e4, 1e7])
@pytest.mark.parametrize("name", PROGRAMS)
def test_offset_data(name: str, offset: float) -> None:
    program = PROGRAMS[name]
    compiled = dynamotor.compile(program)
    for rows in (8, 24):
        x = torch.randn(rows, 64) * 3 + offset
        right = program(x.double())
        assert error(compiled(x), right) <= max(20 * error(program(x), right), 1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e7, float("inf"), float("nan")])
def test_equal_numbers(value: float) -> None:
    """No difference of rounded squares is negative."""
    x = torch.full((3, 50), value)
    found = dynamotor.compile(torch.std)(x, 1)
    torch.testing.assert_close(found, torch.std(x, 1), equal_nan=True, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0, 100, 1024])
@pytest.mark.parametrize("columns", [64, 8192, 8200])
def test_offset_halves(dtype: torch.dtype, offset: float, columns: int) -> None:
    """One number of a row differs, or all do."""
    x = torch.full((3, columns), float(offset), dtype=dtype)
    x[:, 5] = offset * (1 + 1 / 64)
    x[1] = (torch.randn(columns) + offset).to(dtype)
    for program in (
        lambda x: x.float().var(1),
        lambda x: x.var(1).float(),
        lambda x: F.layer_norm(x, x.shape[1:]),
    ):
        right = program(x.double())
        found = dynamotor.compile(program)(x)
        assert error(found, right) <= max(2 * error(program(x), right), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_means_beside_variances_of_infinities(dtype: torch.dtype) -> None:
    x = torch.randn(5, 9, dtype=dtype)
    x[0, 0] = x[1, 4] = torch.inf
    x[2, 1], x[2, 3] = torch.inf, -torch.inf
    for program in (
        lambda x: torch.var_mean(x, 1),
        lambda x: torch.std_mean(x, 1),
        lambda x: torch.var_mean(x[:, :1], 1, correction=0),
    ):
        for found, wanted in zip(dynamotor.compile(program)(x), program(x), strict=True):
            torch.testing.assert_close(found, wanted, equal_nan=True)
