"""A generator that waits inside `try` when a trace ends: only handlers that would act on its closing end the
graph.
"""

from __future__ import annotations

import collections.abc
from typing import Any

import torch

import dynamotor


class Pair(collections.abc.Sequence):
    """Its inherited `__iter__` yields inside `try: ... except IndexError`."""

    def __getitem__(self, index: int) -> int:
        if index > 1:
            raise IndexError
        return index + 2

    def __len__(self) -> int:
        return 2


def test_an_except_clause_that_closing_passes_over_is_no_reason_to_break() -> None:
    pair = Pair()
    compiled = dynamotor.compile(
        lambda x: x * next(iter(pair)) + (3 in pair), fullgraph=True, backend="eager"
    )
    x = torch.randn(3)
    torch.testing.assert_close(compiled(x), x * 2 + 1)


def test_finally_of_a_generator_left_behind_runs_as_in_eager() -> None:
    log: list[str] = []

    def numbers() -> Any:
        try:
            yield 2
            yield 3
        finally:
            log.append("closed")

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * next(numbers())

    x = torch.randn(3)
    torch.testing.assert_close(dynamotor.compile(f, backend="eager")(x), f(x))
    assert log == ["closed", "closed"]
