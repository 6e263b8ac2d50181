"""`scan` and `map` over tensors whose length differs between calls were a program a length, and eager after 16."""

import pytest
import torch
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan

import dynamotor
from dynamotor.base.events import counters

pytestmark = pytest.mark.regression

W = torch.randn(4, 4)
PROGRAMS = {
    "scan": lambda x: scan(lambda c, y: (c + y, (c * y) + 0), torch.zeros(4), x)[1] * 2,
    "backwards": lambda x: scan(lambda c, y: (c @ W + y, (c * y) + 0), torch.zeros(4), x, reverse=True)[1],
    "another dimension": lambda x: scan(lambda c, y: (c + y, (c * y) + 0), torch.zeros(4), x.t(), dim=1)[1],
    "two tensors": lambda x: scan(lambda c, z: (c + z[0] * z[1], c * 2), torch.zeros(4), (x, x.cos()))[0],
    "map": lambda x: map_(lambda row: row.sin() * 2 + W[0], x) + x.shape[0],
    "map with a whole tensor": lambda x: map_(lambda row, w: (row @ w).relu(), x, x.t() @ x),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_one_program_serves_all_lengths(name, backend):
    dynamotor.reset()
    fn, before = PROGRAMS[name], counters["frames"]["captured"]
    compiled = dynamotor.compile(fn, backend=backend, fullgraph=True)
    for n in (5, 7, 3, 12, 17):
        x = torch.randn(n, 4)
        torch.testing.assert_close(compiled(x), fn(x), rtol=1e-4, atol=1e-4)
    assert counters["frames"]["captured"] - before == 2


def test_gradients():
    dynamotor.reset()

    def loss(x):
        return map_(lambda row: row.sin() * 2 + W[0], x).square().sum()

    compiled = dynamotor.compile(loss)
    for n in (5, 7, 3):
        x = torch.randn(n, 4, requires_grad=True)
        (want,) = torch.autograd.grad(loss(x), x)
        (got,) = torch.autograd.grad(compiled(x), x)
        torch.testing.assert_close(got, want)
