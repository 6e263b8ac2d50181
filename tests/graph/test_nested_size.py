"""Jagged tensors' own sizes as values of specs."""

from __future__ import annotations

import torch

from dynamotor.graph.nested_size import NestedSize
from dynamotor.graph.sizes import ShapeEnv
from dynamotor.graph.sym_int import from_torch, to_torch


def test_a_nested_size_goes_to_pytorch_and_back():
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    found = from_torch(x.shape[1])
    assert type(found) is NestedSize and found.coefficient == 1
    assert to_torch(found) == x.shape[1] and to_torch(found * 3) == x.stride(0)
    assert from_torch(x.stride(0)) == 3 * found


def test_a_coefficient_may_be_an_expression():
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    width = ShapeEnv().symbol(3)
    found = from_torch(x.shape[1] * to_torch(width))
    assert found.offsets == from_torch(x.shape[1]).offsets and found.coefficient.same(width)
