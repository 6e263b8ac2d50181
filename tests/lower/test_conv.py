"""oneDNN's backward of a 1×1 convolution with a stride, channels-last with few channels, overwrites memory:
it runs row-major.

MobileOne's stem has one; training it crashed, eager's does with channels-last inputs.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamotor

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_right_and_memory_is_whole(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    stem = nn.ModuleList([nn.Conv2d(3, 48, 3, stride=2, padding=1), nn.Conv2d(3, 48, 1, stride=2)]).double()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(stem[0](x) + stem[1](x))

    x = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    wanted = torch.autograd.grad(
        fn(leaf := x.clone().requires_grad_()).square().sum(), [leaf, *stem.parameters()]
    )
    stem.float()
    compiled = dynamotor.compile(fn)
    for _ in range(10):
        leaf = x.float().to(memory_format=memory_format).requires_grad_()
        got = torch.autograd.grad(compiled(leaf).square().sum(), [leaf, *stem.parameters()])
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


def test_a_part_of_the_backward_without_convolutions_reads_saved_values_in_eagers_layout() -> None:
    def fn(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, other: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        y = nn.functional.conv2d(x, weight).as_strided((4,), (1,))
        return other * 2, y, nn.functional.layer_norm(y, (4,), scale)

    shapes = ((1, 2, 5, 4), (2, 2, 1, 1), (4,), (3,))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    results = [
        torch.autograd.grad(out := program(*inputs), inputs, [torch.ones_like(t) for t in out])
        for program in (dynamotor.compile(fn), fn)
    ]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
