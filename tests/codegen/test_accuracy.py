"""Functions that the C++ kernels compute themselves, in units of the last place of float32, held against float64."""

import pytest
import torch

import dynamotor
from dynamotor.codegen import cpp_kernel, cpp_prelude

PIECES = cpp_kernel.machine_width() == 16  # vectors hold the coefficients of polynomials
MOST = {
    "tanh": (torch.tanh, 1.1 if PIECES else 2.7),
    "sigmoid": (torch.sigmoid, 2.1),
    "exp": (torch.exp, 1.1),
    "erf": (torch.erf, 1.3 if PIECES else 5.4),
    "expm1": (torch.expm1, 1.0),
    "log": (lambda x: x.abs().log(), 1.2),
    "log1p": (lambda x: x.abs().log1p(), 1.0),
    "sin": (torch.sin, 0.8),
    "cos": (torch.cos, 0.8),
    "tan": (torch.tan, 1.2),
    "softplus": (torch.nn.functional.softplus, 1.8),
}


def units(value, exact):
    """The most units of the last place by which a value of float32 is off."""
    size = exact.float().abs()
    unit = (torch.nextafter(size, torch.tensor(torch.inf)) - size).double()
    return ((value.double() - exact).abs() / unit).max()


@pytest.mark.parametrize("name", MOST)
def test_units_of_the_last_place(name):
    function, most = MOST[name]
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([[6.0], [0.5], [0.02]])
    x = (torch.randn(3, 40_000, generator=generator) * scales).flatten()
    assert units(dynamotor.compile(function)(x), function(x.double())) < most
    assert torch.equal(dynamotor.compile(function)(x[:77]), dynamotor.compile(function)(x)[:77])  # any width


@pytest.mark.skipif(cpp_kernel.machine_width() < 8, reason="the C library's function")
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_angles_beside_each_multiple_of_a_quarter_turn(name):
    """Zeros and poles, where the difference of angle and multiple has few digits."""
    function, most = MOST[name]
    turns = torch.arange(83_000, dtype=torch.float64).mul(torch.pi / 2).float()
    x = torch.cat([turns, turns.nextafter(torch.tensor(torch.inf)), -turns, turns + 0.7])
    assert units(dynamotor.compile(function)(x), function(x.double())) < most
    assert "turned_(" in cpp_prelude.prelude(f"{name}_(v1)", {16})


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_an_angle_beyond_the_limit_changes_no_other(name):
    function = MOST[name][0]
    x = torch.linspace(-9.0, 9.0, 64)
    far = x.clone()
    far[5::7] = torch.tensor([1e6, torch.inf, -3e38, torch.nan, 131073.0, -1e9, 2e5, torch.inf, 1e20])
    got, near = dynamotor.compile(function)(far), dynamotor.compile(function)(x)
    same = far == x
    assert torch.equal(got[same], near[same])
    torch.testing.assert_close(got, function(far), equal_nan=True)


@pytest.mark.parametrize("function", [torch.erf, torch.tanh])
def test_pieces_meet(function):
    """Each edge between two polynomials, numbers without a piece, and both zeros, in vectors and alone."""
    edges = torch.cat([(torch.arange(17) - 0.5) * 0.25460306, torch.arange(40) * 0.25, torch.tensor([3.943])])
    beside = torch.cat([edges.nextafter(torch.tensor(way)) for way in (-torch.inf, torch.inf)])
    odd = torch.tensor([0.0, 1e-45, 1e-38, 1e-20, 3e38, torch.inf, torch.nan])
    x = torch.cat([edges, beside, odd])
    x = torch.cat([x, -x])
    got, most = dynamotor.compile(function)(x), MOST[function.__name__][1]
    want, usual = function(x.double()), x.abs() > 1e-37
    assert units(got[usual & x.isfinite()], want[usual & x.isfinite()]) < most
    torch.testing.assert_close(got, want.float(), rtol=0, atol=1e-6, equal_nan=True)
    assert torch.equal(got[~x.isnan()].signbit(), x[~x.isnan()].signbit())
    for width in (1, 4, 8):
        few = dynamotor.compile(function)(x[-width:])
        torch.testing.assert_close(few, got[-width:], rtol=0, atol=0, equal_nan=True)
