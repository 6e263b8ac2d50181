"""Elementwise functions of few programs, and gated halves, on ordinary and special values."""

from __future__ import annotations

import math

import pytest
import torch
from harness import check

import dynamotor
from dynamotor.base.events import counters

aten = torch.ops.aten
SPECIAL = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 0.9, 1e-6, -1e-6, 30.0, -30.0, math.inf, -math.inf, math.nan]
OPS = {
    "fmax": lambda g, x: aten.fmax(g, x),
    "fmin": lambda g, x: aten.fmin(g, x),
    "logaddexp": lambda g, x: aten.logaddexp(g, x),
    "logaddexp2": lambda g, x: aten.logaddexp2(g, x),
    "xlog1py": lambda g, x: aten.special_xlog1py(g, x),
    "entr": lambda g, x: aten.special_entr(x),
    "logit": lambda g, x: aten.logit(x),
    "logit within": lambda g, x: aten.logit(x, 0.1),
    "logit_backward": lambda g, x: aten.logit_backward(g, x),
    "logit_backward within": lambda g, x: aten.logit_backward(g, x, 0.1),
    "elu_backward": lambda g, x: aten.elu_backward(g, 0.7, 1.2, 0.9, False, x),
    "elu_backward of its result": lambda g, x: aten.elu_backward(g, 0.7, 1.2, 0.9, True, x.clamp_min(-0.8)),
    "hardshrink_backward": lambda g, x: aten.hardshrink_backward(g, x, 0.5),
    "softshrink_backward": lambda g, x: aten.softshrink_backward(g, x, 0.5),
    "signbit": lambda g, x: aten.signbit(x),
    "isposinf": lambda g, x: aten.isposinf(x),
    "isneginf": lambda g, x: aten.isneginf(x),
    "deg2rad": lambda g, x: aten.deg2rad(x),
    "rad2deg": lambda g, x: aten.rad2deg(x),
}
# Of floats on a CPU eager's vectors compute these otherwise, for NaN, than its loops over the last elements.
LEFT = [op for op in OPS if "_backward" in op]


def operands(dtype):
    torch.manual_seed(0)
    # At the start and at the end: eager computes whole vectors, then the remaining elements one by one.
    special, other = (
        torch.tensor(SPECIAL),
        torch.tensor(SPECIAL).roll(3),
    )
    x = torch.cat([special, torch.randn(30) * 2, special])
    return torch.cat([other, torch.randn(30), other]).to(dtype), x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_functions_are_as_in_eager(op, dtype):
    g, x = operands(dtype)
    left = None if op in LEFT else ()
    check(OPS[op], g, x, fallbacks=left)
    check(OPS[op], g[:, None], x, fallbacks=left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gates_are_as_in_eager(dim, dtype):
    torch.manual_seed(0)
    x, g = torch.randn(6, 32, 8).to(dtype), torch.randn(6, 32, 8).to(dtype)
    check(lambda x: torch.nn.functional.glu(x, dim), x)
    half = g.chunk(2, dim)[0]
    left = ("aten.glu_backward.default",) if dtype is torch.bfloat16 else ()
    check(lambda g, x: aten.glu_backward(g, x, dim), half, x, fallbacks=left)


@pytest.mark.parametrize("op", [*(op for op in OPS if op not in LEFT), "glu"])
def test_none_of_them_is_left_to_aten(op):
    g, x = operands(torch.float32)
    fn = OPS.get(op, lambda g, x: torch.nn.functional.glu(x, 0))
    before = dict(counters["fallback"])
    dynamotor.compile(lambda g, x: fn(g, x) * 1, fullgraph=True)(g, x)
    assert counters["fallback"] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_bessel_functions_are_as_in_eager(dtype):
    numbers = [
        0.0,
        -0.0,
        1e-30,
        1e-6,
        2.404825557695773,
        0.4999999,
        -0.5,
        5.0,
        -5.0,
        5.000001,
        1e3,
        -1e6,
        math.inf,
        -math.inf,
        math.nan,
    ]
    x = torch.cat(
        [torch.tensor(numbers, dtype=torch.float64), torch.linspace(-40, 40, 301, dtype=torch.float64)]
    )
    x = x.nan_to_num(0, 0, 0).to(dtype) if dtype is torch.int64 else x.to(dtype)
    check(lambda x: torch.special.bessel_j0(x) * 2, x, kernels=1)
    check(lambda x: torch.special.spherical_bessel_j0(x) * 2, x, kernels=1)


def test_gradients_are_eagers():
    for fn in (
        lambda x: torch.nn.functional.glu(x, 1),
        lambda x: torch.logaddexp(x, x.flip(0)),
        lambda x: torch.fmax(x, x.flip(0)),
        lambda x: torch.logit(x.sigmoid()),
    ):
        x = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
        want = torch.autograd.grad(fn(x).square().sum(), x)
        got = torch.autograd.grad(dynamotor.compile(fn, fullgraph=True)(x).square().sum(), x)
        torch.testing.assert_close(want, got)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_whole_numbers_are_never_infinite_and_stay_as_they_are_when_rounded(dtype):
    x = torch.tensor([0, 1, -3, 100, 127]).to(dtype).repeat(40)
    for fn in (torch.floor, torch.ceil, torch.round, torch.trunc):
        check(lambda x, fn=fn: fn(x) + 1, x, kernels=1)
    for fn in (torch.isinf, torch.isposinf, torch.isneginf, torch.signbit):
        check(lambda x, fn=fn: (fn(x), ~fn(x)), x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int8, torch.int32], ids=str)
def test_extremes_of_whole_numbers_without_nan_are_no_calls(dtype):
    x, y = torch.arange(-60, 60).to(dtype), torch.arange(60, -60, -1).to(dtype)
    check(
        lambda x, y: (torch.fmin(x, y), torch.fmax(x, y), torch.fmax(x, y[:1])), x, y, kernels=1, tolerance=0
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str
)
def test_angles_of_real_numbers(dtype):
    x = torch.tensor([-3.0, -0.0, 0.0, 2.0] * 9)
    if dtype.is_floating_point:
        x = torch.cat([x, torch.tensor([torch.nan, -torch.inf, torch.inf])])
    check(torch.angle, x.to(dtype), kernels=1, tolerance=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8, torch.bool], ids=str)
def test_angles_of_integers_are_floats(dtype):
    x = torch.arange(300).to(dtype)
    check(lambda x: (torch.deg2rad(x), torch.rad2deg(x) * 2), x, kernels=1, tolerance=0)
