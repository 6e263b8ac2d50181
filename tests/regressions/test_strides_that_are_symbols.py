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
