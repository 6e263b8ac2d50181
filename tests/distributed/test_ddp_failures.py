"""A rank that disagrees, dies or sleeps is a coded error on every rank that lives, within the group's timeout."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import ddp_failures as failures
import pytest
from ranks import Pair


@pytest.fixture
def fresh_pair() -> Iterator[Pair]:
    """Two processes of their own, with a short timeout."""
    pair = Pair(group_timeout=4.0)
    yield pair
    pair.kill()


def test_other_bucket_sizes_are_an_error_on_both_ranks(pair: Pair) -> None:
    assert pair.run(failures.other_plan) == ["DM701", "DM701"]


def test_a_parameter_without_gradient_is_an_error_on_both_ranks(pair: Pair) -> None:
    assert pair.run(failures.without_gradient) == ["DM704", "DM704"]


def test_a_parameter_that_loses_its_gradient_later(pair: Pair) -> None:
    assert pair.run(failures.without_gradient_later) == ["no error, DM704", "no error, DM704"]


def test_one_rank_that_cannot_makes_all_leave_it_to_ddp(pair: Pair) -> None:
    for code, modes, same in pair.run(failures.disagree_on_the_way):
        assert code == "no error" and set(modes) == {"split"} and same


@pytest.mark.parametrize(("function", "arguments", "answer"), [
    (failures.dies_in_backward, (), "DM703"), (failures.dies_in_backward, ("split",), "RuntimeError"),
    (failures.dies_before_forward, (), "DM703")], ids=["in the graph", "split", "before a forward"])
def test_a_rank_that_dies(fresh_pair: Pair, function: Any, arguments: tuple[str, ...], answer: str) -> None:
    began = time.monotonic()
    for pipe in fresh_pair.pipes:
        pipe.send((function, arguments))
    assert fresh_pair.answer(fresh_pair.pipes[0], 25.0) == answer
    assert time.monotonic() - began < 20.0


def test_a_rank_that_hangs_in_backward(fresh_pair: Pair) -> None:
    answer, slept = fresh_pair.run(failures.hangs_in_backward, 8.0)
    assert answer.startswith("DM703") and slept == "slept"


def test_a_rank_that_does_not_compile(fresh_pair: Pair) -> None:
    assert fresh_pair.run(failures.never_compiles)[0] == "DM702"
