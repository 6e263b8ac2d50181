"""The random prims: known answers, repeatability, distribution."""

from __future__ import annotations

import torch

from dynamotor.graph.prims import philox
from dynamotor.graph.shape_tensor import ShapeTensor, shape_mode
from dynamotor.graph.spec import TensorSpec

ops = torch.ops.dynamotor


def test_philox_known_answers():
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(w) for w in philox(zero, 0, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_seed_follows_manual_seed():
    torch.manual_seed(4)
    a = ops.new_seed()
    torch.manual_seed(4)
    assert torch.equal(a, ops.new_seed()) and not torch.equal(a, ops.new_seed())


def test_rand_is_a_pure_function_of_seed_stream_and_index():
    seed = ops.new_seed()
    a, b = ops.rand(seed, 1, [7, 11]), ops.rand(seed, 1, [7, 11])
    assert torch.equal(a, b)
    assert not torch.equal(a, ops.rand(seed, 2, [7, 11]))
    assert torch.equal(ops.rand(seed, 1, [77]), a.view(-1))
    assert ops.rand(seed, 1, [0, 3]).shape == (0, 3)
    assert ops.rand(seed, 0, [3], dtype=torch.float64).dtype is torch.float64


def test_few_numbers_begin_as_many():
    seed = torch.tensor([-1234567890123456789])
    many = ops.rand(seed, 7, [200])
    for n in (1, 3, 63, 64, 65):
        assert torch.equal(ops.rand(seed, 7, [n]), many[:n])
    assert torch.equal(ops.rand(seed, 7, [], dtype=torch.float64), many[0].double())


def test_rand_is_uniform():
    u = ops.rand(torch.tensor([123456789012345]), 0, [200_000])
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]) < 0.01


def test_shapes():
    with shape_mode():
        seed = ops.new_seed()
        assert isinstance(seed, ShapeTensor)
        assert ops.rand(seed, 0, [2, 3]).spec == TensorSpec.dense((2, 3), torch.float32)
