"""Linear layers whose weights are bytes stand for those that they were made of."""

import pytest
import torch
from torch import nn

from bench.decode_weights import quantise


@pytest.mark.parametrize(("weights", "error"), [("int8", 0.02), ("int4", 0.2)])
@pytest.mark.parametrize("bias", [False, True])
def test_quantised_layers_are_near_the_dense_ones(weights, error, bias):
    model = nn.Sequential(nn.Linear(64, 96, bias=bias), nn.Sequential(nn.Linear(96, 32, bias=bias)))
    x = torch.randn(4, 64)
    with torch.no_grad():
        want = model(x)
        quantise(model, weights)
        got = model(x)
    assert not any(isinstance(m, nn.Linear) for m in model.modules())
    assert (got - want).norm() <= error * want.norm()
