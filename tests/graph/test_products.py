"""`matmul` of sizes that are symbols, also where PyTorch's own takes plain numbers (before 2.13)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from every_backend import BACKENDS, same
from torch import nn

import dynamotor
from dynamotor.base.events import counters
from dynamotor.graph import products

SHAPES = [(6,), (7, 6), (5, 7, 6), (1, 7, 6), (3, 5, 7, 6), (3, 1, 7, 6), (1, 5, 7, 6), (5, 1, 6)]


@pytest.fixture(autouse=True)
def _afresh() -> None:
    dynamotor.reset()
    counters["specialised"].clear()


@pytest.mark.parametrize("strided", [False, True])
def test_products_are_those_of_pytorch(strided: bool) -> None:
    for first, second in itertools.product(SHAPES, SHAPES):
        a = torch.randn(first, dtype=torch.float64)
        b = torch.randn(second, dtype=torch.float64)
        b = b.mT.contiguous() if b.dim() > 1 else b
        if strided:
            a, b = (x.mT.contiguous().mT if x.dim() > 1 else x for x in (a, b))
        try:
            want = a @ b
        except RuntimeError:
            with pytest.raises(RuntimeError):
                products.matmul(a, b)
            continue
        torch.testing.assert_close(products.matmul(a, b), want)


class _Layer(nn.Module):
    """What calls `matmul` from C++: a linear layer without a bias, attention by plain products."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        query, key = self.fused(x).unflatten(-1, (4, 4)).transpose(1, 2).chunk(2, 1)
        keys = torch.cat([past, key], 2)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return nn.functional.scaled_dot_product_attention(query, keys, keys, enable_gqa=True)


def test_one_program_for_every_size() -> None:
    layer = _Layer()
    captured = counters["frames"]["captured"]
    compiled = dynamotor.compile(layer, dynamic=True, backend="aot_eager")
    for batch, length, past in ((3, 5, 7), (5, 9, 11)):
        args = torch.randn(batch, length, 8), torch.randn(batch, 2, past, 4)
        gradients = []
        for call in (layer, compiled):
            layer.zero_grad()
            call(*args).square().sum().backward()
            gradients.append(layer.fused.weight.grad)
        torch.testing.assert_close(*gradients)
    assert counters["frames"]["captured"] == captured + 1 and not counters["specialised"]


@pytest.mark.regression
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [8, 7])
def test_grouped_matrix_products(backend, width):
    """MixtralForCausalLM: the rows of the result are aligned."""
    if width % 4 and backend == "native":
        pytest.skip("eager asks for aligned operands")
    x, weight = torch.randn(10, 12), torch.randn(3, width, 12).transpose(1, 2)
    offsets = torch.tensor([3, 6, 10], dtype=torch.int32)
    ours, theirs = same(lambda a, w, o: F.grouped_mm(a, w, offs=o), x, weight, offsets, backend=backend)
    assert ours.stride() == theirs.stride()
