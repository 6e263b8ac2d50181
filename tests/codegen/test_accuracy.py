"""Functions that the C++ kernels compute themselves, in units of the last place of float32, held against float64."""

import pytest
import torch

import dynamotor

MOST = {
    "tanh": (torch.tanh, 2.7),
    "sigmoid": (torch.sigmoid, 2.1),
    "exp": (torch.exp, 1.1),
    "erf": (torch.erf, 5.4),
    "expm1": (torch.expm1, 1.0),
    "log": (lambda x: x.abs().log(), 1.2),
    "log1p": (lambda x: x.abs().log1p(), 1.0),
    "sin": (torch.sin, 0.8),
    "softplus": (torch.nn.functional.softplus, 1.8),
}


@pytest.mark.parametrize("name", MOST)
def test_units_of_the_last_place(name):
    function, most = MOST[name]
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([[6.0], [0.5], [0.02]])
    x = (torch.randn(3, 40_000, generator=generator) * scales).flatten()
    exact = function(x.double())
    unit = (torch.nextafter(exact.float().abs(), torch.tensor(torch.inf)) - exact.float().abs()).double()
    assert ((dynamotor.compile(function)(x).double() - exact).abs() / unit).max() < most
    assert torch.equal(dynamotor.compile(function)(x[:77]), dynamotor.compile(function)(x)[:77])  # any width
