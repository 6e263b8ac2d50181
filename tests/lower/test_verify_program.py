"""The verifier tries the positions where the bounds of sums say too little."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import dynamotor
from dynamotor.base.config import config
from dynamotor.base.events import counters
from dynamotor.lower import index_bounds
from dynamotor.lower.index_expr import Index, Var


def test_conditions_and_remainders_together() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x < y.flip(0, -1).reshape((112, 1, 1)).roll(1, 0).prod(0)).any(1)

    x, y = torch.randn(7, 8, 2), torch.randn(7, 8, 2)
    with config.patch(strict=True, verify=True):
        assert torch.equal(dynamotor.compile(f)(x, y), f(x, y))


def test_loops_of_a_batch_and_of_channels_do_not_multiply_the_places() -> None:
    """Swin's windows: at a batch of 32 the index was not decided, and the model ran in eager (DM913)."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        images = x.view(-1, 8, 8, 7, 7, 512).permute(0, 1, 3, 2, 4, 5).reshape(-1, 56, 56, 512)
        moved = y + images.roll((3, 3), (1, 2))
        return moved.view(-1, 8, 7, 8, 7, 512).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, 512).relu()

    x, y = torch.randn(64, 49, 512), torch.randn(1, 56, 56, 512)
    with config.patch(strict=True, verify=True):
        assert torch.equal(dynamotor.compile(f)(x, y), f(x, y))


def test_a_condition_on_sizes_alone_that_never_holds() -> None:
    """`s0 - 1 < s0 - 1` of two rolls: what stands under it was looked at, and sizes stayed numbers (DM913)."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.permute(1, 2, 0).roll((-1, 1), (0, 1)).roll((1, -5), (0, 2))[:, :, 2:10:2]

    counters.clear()
    compiled = dynamotor.compile(f, dynamic=True)
    with config.patch(strict=True, verify=True):
        for x in (torch.randn(16, 10, 6), torch.randn(12, 9, 7)):
            assert torch.equal(compiled(x), f(x))
    assert not counters["capture"]["sizes kept numbers"]


def _values(index: Index, facts: index_bounds.Facts, loops: list[Var]) -> list[int]:
    found = []
    for values in itertools.product(*(range(v.size) for v in loops)):
        places = dict(zip(loops, map(torch.tensor, values), strict=True))
        if all(a <= int(index_bounds._value(form, places)) <= b for form, (a, b) in facts):
            found.append(int(index_bounds._value(index, places)))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_ends_are_those_of_all_places(seed: int) -> None:
    draw = random.Random(seed)
    loops = [Var(f"i{n}", draw.randint(1, 5)) for n in range(4)]

    def form(depth: int = 2) -> Index:
        some = draw.sample(loops, draw.randint(1, 2))
        sum_ = sum((Index.of(v) * draw.choice([-3, 1, 2, 7]) for v in some), Index({}, draw.randint(0, 3)))
        return (
            sum_ + (form(depth - 1) + 40) // draw.randint(2, 5) + (form(depth - 1) + 40) % 6
            if depth
            else sum_
        )

    index = form()
    facts = tuple((form(1) - 0, (-2, draw.randint(0, 12))) for _ in range(draw.randint(0, 2)))
    met = _values(index, facts, loops)
    found = index_bounds.ends(index, facts)
    assert found == ((min(met), max(met)) if met else (0, -1))


def test_of_too_many_places_some_are_looked_at() -> None:
    i, j, k = (Index.of(Var(name, 1000)) for name in "ijk")
    assert index_bounds.ends((i + j + k) // 2, ()) == (0, 2997 // 2)
