"""A generator that waits inside `try` when a trace ends: only handlers that would act on its closing end the
graph.
"""

from __future__ import annotations

import collections.abc
from typing import Any

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


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


def test_finally_around_an_except_clause_that_closing_passes_over() -> None:
    log: list[str] = []

    def one_statement() -> Any:
        try:
            yield 2
        except ValueError:
            log.append("error")
        finally:
            log.append("closed")

    def two_statements() -> Any:
        try:
            try:
                yield 2
            except KeyError:
                log.append("error")
        finally:
            log.append("closed")

    def from_another() -> Any:
        yield from one_statement()

    for numbers in (one_statement, two_statements, from_another):

        def f(x: torch.Tensor, numbers: Any = numbers) -> torch.Tensor:
            it = numbers()
            y = x * next(it)
            del it
            log.append("after")
            return y

        compiled = dynamotor.compile(f, backend="eager")
        for function in (f, compiled, compiled):
            log.clear()
            function(torch.randn(3))
            assert log == ["closed", "after"]


LOG: list[str] = []


@dynamotor.disable
def _left_alone(x: torch.Tensor) -> torch.Tensor:
    return x


def _batches(x: torch.Tensor) -> Any:
    try:
        for i in range(3):
            yield _left_alone(x) + i
    finally:
        LOG.append("closed")


def _a_break(x: torch.Tensor) -> torch.Tensor:
    for y in _batches(x):
        x = x + y.sin()
        if x.shape[0] > 1:
            break
    LOG.append("behind the loop")
    return x


def _a_break_by_number(x: torch.Tensor) -> torch.Tensor:
    for i, y in enumerate(_batches(x)):
        x = x + y.sin()
        if i == 1:
            break
    LOG.append("behind the loop")
    return x


def _a_return(x: torch.Tensor) -> torch.Tensor:
    def first(x: torch.Tensor) -> torch.Tensor:
        for y in _batches(x):
            if y.shape[0] > 1:
                return y.sin()
        return x

    y = first(x)
    LOG.append("behind the call")
    return y


def _a_deletion(x: torch.Tensor) -> torch.Tensor:
    batches = _batches(x)
    y = next(batches).sin()
    LOG.append("before")
    del batches
    LOG.append("behind")
    return y


def _to_the_end(x: torch.Tensor) -> torch.Tensor:
    for y in _batches(x):
        x = x + y.sin().exp()
    LOG.append("behind the loop")
    return x


@pytest.mark.parametrize("f", [_a_break, _a_break_by_number, _a_return, _a_deletion, _to_the_end])
def test_a_loop_over_a_generator_closes_it_when_the_program_lets_go(f: Any) -> None:
    compiled, x, found = dynamotor.compile(f, backend="eager"), torch.randn(3), []
    for run in (f, compiled, compiled):
        LOG.clear()
        found.append((run(x), list(LOG)))
    for result, log in found[1:]:
        torch.testing.assert_close(result, found[0][0])
        assert log == found[0][1]
