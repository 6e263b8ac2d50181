"""An embedding with sparse gradients: a sparse tensor has no strides, so no graph holds one.

Found by a data-parallel program: the backward's result was checked against a dense tensor's strides (DM404).
"""

import copy

import pytest
import torch
from torch import nn

import dynamotor

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_gradients_stay_sparse(backend):
    net = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 3)).double()
    twin, x = copy.deepcopy(net), torch.tensor([1, 5, 1])
    compiled = dynamotor.compile(twin, backend=backend)
    for _ in range(2):
        net(x).sum().backward()
        compiled(x).sum().backward()
    assert twin[0].weight.grad.is_sparse
    torch.testing.assert_close(twin[0].weight.grad.to_dense(), net[0].weight.grad.to_dense())
    torch.testing.assert_close(twin[1].weight.grad, net[1].weight.grad)
