"""A rank that disagrees, dies or sleeps is a coded error on every rank that lives, within the group's
timeout.
"""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("both", "one"),
    [
        ({"mode": "split"}, {"find_unused_parameters": True}),
        ({"mode": "off"}, {"static_graph": True}),
        ({"find_unused_parameters": True}, {"bucket_cap_mb": 0.002}),
        ({}, {"find_unused_parameters": True}),
    ],
    ids=["unused in split", "static in off", "buckets of unused", "unused on one"],
)
def test_other_arguments_are_an_error_where_ddp_reduces(
    pair: Pair, both: dict[str, Any], one: dict[str, Any]
) -> None:
    assert pair.run(failures.other_settings, both, one) == ["DM701", "DM701"]


@pytest.mark.parametrize(
    "variant", ["in the graph", "split", "off", "in the graph, bucket view", "off, bucket view"]
)
def test_a_parameter_without_gradient_is_an_error_on_both_ranks(pair: Pair, variant: str) -> None:
    assert pair.run(failures.without_gradient, variant) == ["DM704", "DM704"]


@pytest.mark.parametrize(
    "variant", ["in the graph", "split", "off", "in the graph, bucket view", "off, bucket view"]
)
def test_a_parameter_that_loses_its_gradient_later(pair: Pair, variant: str) -> None:
    assert pair.run(failures.without_gradient_later, variant) == ["no error, DM704", "no error, DM704"]


def test_a_static_graph_that_changes(pair: Pair) -> None:
    assert pair.run(failures.without_gradient_later, "static graph") == ["no error, DM704", "no error, DM704"]


@pytest.mark.parametrize("function", [failures.without_gradient, failures.without_gradient_later])
def test_unused_parameters_that_ddp_was_told_of_are_no_error(pair: Pair, function: Any) -> None:
    assert all("DM" not in answer for answer in pair.run(function, "unused parameters"))


def test_one_rank_that_cannot_makes_all_leave_it_to_ddp(pair: Pair) -> None:
    for code, modes, same in pair.run(failures.disagree_on_the_way):
        assert code == "no error" and set(modes) == {"split"} and same


def test_a_rank_that_dies_in_a_backward(fresh_pair: Pair) -> None:
    for pipe in fresh_pair.pipes:
        pipe.send((failures.dies_in_backward, ()))
    expected = dict.fromkeys([*failures.VARIANTS, "whole step"], "DM703")
    assert fresh_pair.answer(fresh_pair.pipes[0], 25.0) == expected


def test_a_rank_that_dies_before_a_forward(fresh_pair: Pair) -> None:
    for pipe in fresh_pair.pipes:
        pipe.send((failures.dies_before_forward, ()))
    assert fresh_pair.answer(fresh_pair.pipes[0], 25.0) == "DM703"


@pytest.mark.slow  # it waits; a rank that dies in one is found by the same calls
def test_a_rank_that_stays_away_from_a_backward(pair: Pair) -> None:
    answer, away = pair.run(failures.hangs_in_backward)
    assert answer == dict.fromkeys([*failures.VARIANTS, "whole step"], "DM703") and set(away.values()) == {
        "no error"
    }


@pytest.mark.slow
def test_a_rank_that_does_not_compile(fresh_pair: Pair) -> None:
    assert fresh_pair.run(failures.never_compiles)[0] == "DM702"
