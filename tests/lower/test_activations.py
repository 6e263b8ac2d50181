"""Activations of few models and their gradients, on ordinary and special values."""

import pytest
import torch
from harness import check

aten = torch.ops.aten
SPECIAL = [
    0.0,
    -0.0,
    0.5,
    -0.5,
    1.0,
    -1.0,
    1e-6,
    -1e-6,
    30.0,
    -30.0,
    float("inf"),
    float("-inf"),
    float("nan"),
]
OPS = {
    "celu": lambda g, x: aten.celu(x, 0.7),
    "mish_backward": lambda g, x: aten.mish_backward(g, x),
    "threshold": lambda g, x: aten.threshold(x, 0.5, 0.3),
    "hardshrink": lambda g, x: aten.hardshrink(x, 0.5),
    "softshrink": lambda g, x: aten.softshrink(x, 0.5),
    "prelu": lambda g, x: aten._prelu_kernel(x, g[:1]),
    "prelu_backward": lambda g, x: aten._prelu_kernel_backward(g, x, g[:1]),
    "xlogy": lambda g, x: aten.xlogy(g, x),
    "xlogy of a number": lambda g, x: aten.xlogy(0.0, x),
    "xlogy by a number": lambda g, x: aten.xlogy(x, 0.3),
    "sinc": lambda g, x: aten.sinc(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_activations_are_as_in_eager(op: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(30) * 2]).to(dtype)
    g = torch.randn(x.shape).to(dtype)
    g[[0, 14]] = 0
    check(OPS[op], g, x)
