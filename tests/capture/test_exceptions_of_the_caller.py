"""The exception that the caller is handling is the context of new ones, and the answer of `sys.exception()`
(93002:43940: behind a break in a function that an `except` block calls).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def _kept(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    try:
        raise KeyError("mine")
    except KeyError as error:
        kept = error
    return x + 1, kept.__context__


def _asked(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return x + 1, sys.exception()


def _told(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return x + 1, sys.exc_info()[1]


def _raised_again(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    y = x + 1
    try:
        raise
    except (RuntimeError, ValueError) as error:
        return y, (type(error), str(error))


@pytest.mark.parametrize("function", [_kept, _asked, _told, _raised_again])
@pytest.mark.parametrize("first", [True, False])
def test_a_call_in_and_out_of_an_except_block(function: Callable, first: bool) -> None:
    compiled = dynamotor.compile(function)
    x = torch.ones(2)
    for handling in (first, not first, first):
        found = []
        for run in (function, compiled):
            if not handling:
                found.append(run(x)[1])
                continue
            try:
                raise ValueError("the caller's")
            except ValueError as error:
                result, seen = run(x)
                found.append("the caller's" if seen is error else seen)
        assert repr(found[1]) == repr(found[0])


def test_a_function_that_breaks_in_an_except_block_of_another() -> None:
    found: list[BaseException | None] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        try:
            print(end="")
            raise KeyError(1)
        except KeyError as error:
            found.append(error.__context__)
        return x * 2

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.nothing
        except AttributeError:
            x = inner(x)
        return x

    for run in (function, *[dynamotor.compile(function, backend="eager")] * 2):
        run(torch.ones(2))
    assert [str(error) for error in found] == ["'Tensor' object has no attribute 'nothing'"] * 3


def test_the_end_of_a_generator_has_a_context() -> None:
    """96002:15533."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        try:
            raise ValueError(1)
        except ValueError:
            steps = (v * 2 for v in [x])
            y = next(steps)
            try:
                steps.send(None)
            except StopIteration as end:
                return y, repr(end.__context__)

    compiled = dynamotor.compile(function, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2))[1] == "ValueError(1)"
