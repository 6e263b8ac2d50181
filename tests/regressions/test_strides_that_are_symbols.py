"""Writes through an input whose strides differ between calls: the general program asks that they reach no
element twice.
"""

from __future__ import annotations

import torch

import dynamotor


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


def test_padding_that_is_nothing_at_one_call() -> None:
    """Eager clones where no side grows, which keeps the order of the dimensions."""

    def pad(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (x.shape[0] % 3, 0)) * 2

    compiled = dynamotor.compile(pad)
    for shape in ((5, 3), (6, 6), (5, 8), (7, 11), (4, 9)):
        x = torch.randn(shape).t()
        want, got = pad(x), compiled(x)
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
