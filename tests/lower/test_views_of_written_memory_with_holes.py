"""A view of an input with holes (`x[::2]`) that the graph has written has eager's layout: the written value has no holes,
and views of it were taken for dense (91002:4861; `x += 1; z = x[1:].contiguous(); z += 1` wrote into `x`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

Shown = tuple[torch.Tensor, ...]


def _contiguous(x: torch.Tensor) -> Shown:
    x += 1
    z = x[1:].contiguous()
    z += 1
    return (z,)


def _flat(x: torch.Tensor) -> Shown:
    x += 1
    z = x.unsqueeze(0).reshape(-1)
    z += 1
    return (z,)


def _flat_parts(x: torch.Tensor) -> Shown:
    x.mul_(2)
    left, right = x.split(2, 1)
    z = left.reshape(-1)
    z += 1
    return z, right.reshape(-1)


def _questions(x: torch.Tensor) -> Shown:
    x += 1
    y = x[1:]
    return (y * (2 if y.is_contiguous() else 3) + y.stride(0),)


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("function", [_contiguous, _flat, _flat_parts, _questions])
@pytest.mark.parametrize("dynamic", [None, True])
def test_results_and_the_input_are_eagers(function: Callable, backend: str, dynamic: bool | None) -> None:
    found = []
    for run in (function, dynamotor.compile(function, backend=backend, dynamic=dynamic)):
        memory = torch.arange(24.0).view(6, 4)
        results = run(memory[::2])
        found.append((memory, *results))
        assert all(r.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr() for r in results)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert [t.stride() for t in found[1]] == [t.stride() for t in found[0]]


def test_a_general_program_is_not_for_memory_that_is_seen_twice() -> None:
    """A width beyond the stride, which is a number: `x` overlaps itself there."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2

    compiled = dynamotor.compile(function, dynamic=True)
    for width in (4, 17, 7):
        found = []
        for run in (compiled, function):
            memory = torch.arange(60.0)
            found.append((run(memory.as_strided((3, width), (8, 1))), memory))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_copy_that_aten_writes_in_part_starts_its_memory() -> None:
    """aten's `slice_scatter` copies the whole storage of its operand, here the program's memory."""

    def program(x: torch.Tensor) -> Shown:
        y = x * 1
        part = y[::2]
        part.index_copy_(1, torch.tensor([2]), torch.ones(4, 1, 4))
        first = part.as_strided((4,), (1,), 0)
        part.mul_(3)
        return first, part

    x = torch.arange(7.0 * 5 * 4).view(7, 5, 4)
    first, part = dynamotor.compile(program)(x)
    torch.testing.assert_close(first, program(x)[0])
    assert first.data_ptr() == part.data_ptr() and part.storage_offset() == 0
