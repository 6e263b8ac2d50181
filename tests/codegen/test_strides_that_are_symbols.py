"""Strides that differ between calls: writes through them reach no element twice (the general program asks), and
results have eager's layouts.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def test_a_write_through_strides_that_differ_between_calls() -> None:
    def add(x: torch.Tensor) -> None:
        x.add_(1)

    compiled = dynamotor.compile(add)
    layouts = [
        ((3, 4), (4, 1)),
        ((3, 4), (8, 1)),
        ((5, 4), (8, 1)),
        ((9, 3), (7, 1)),
        ((5, 9), (1, 10)),
        ((7, 5), (1, 9)),
        ((6, 4), (3, 1)),
    ]
    for shape, stride in layouts:
        want, got = (torch.zeros(100).as_strided(shape, stride) for _ in range(2))
        add(want)
        compiled(got)
        assert torch.equal(got, want)


def pad(x: torch.Tensor) -> torch.Tensor:
    """Eager clones where no side grows, which keeps the order of the dimensions."""
    return torch.nn.functional.pad(x, (x.shape[2] % 3, 0)) * 2


def clone_of_a_part(x: torch.Tensor) -> torch.Tensor:
    """Dense where the part is the whole."""
    return x[:, x.shape[2] % 3 :].clone()


def product_of_parts(x: torch.Tensor) -> torch.Tensor:
    part = x.swapaxes(1, 2)[:, x.shape[2] % 3 :]
    return part * part


def write_into_a_copy(x: torch.Tensor) -> torch.Tensor:
    """The copy has the holes of its argument."""
    x = x[:, ::2]
    return torch.slice_scatter(x, x[:, :, 1:], 2, 1)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("function", [pad, clone_of_a_part, product_of_parts, write_into_a_copy])
def test_results_lie_as_eagers_at_every_size(
    function: Callable[[torch.Tensor], torch.Tensor], layout: torch.memory_format
) -> None:
    compiled = dynamotor.compile(function, dynamic=True)
    for shape in ((3, 4, 9, 5), (4, 5, 7, 3), (3, 8, 6, 8), (2, 4, 8, 9)):
        x = torch.randn(shape).contiguous(memory_format=layout)
        want, got = function(x), compiled(x)
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
