"""`compile_step` of a DDP module: losses, weights and gradients of the eager DDP loop, in one program on each rank."""

from __future__ import annotations

from typing import Any

import ddp_step
import pytest
from ranks import Pair

WHOLE: list[dict[str, Any]] = [
    {"optimizer": "sgd"},
    {"optimizer": "plain", "backend": "aot_eager"},
    {"optimizer": "adamw"},
    {"placed": True, "optimizer": "sgd", "backend": "aot_eager"},
    {"accumulate": 3, "backend": "aot_eager"},
    {"accumulate": 2, "clip": 0.1, "optimizer": "sgd"},
    {"clip": 0.1, "scale": 4.0, "optimizer": "sgd"},
    {"optimizer": "last layer", "keep_grads": True, "backend": "aot_eager"},
    {"optimizer": "last layer", "accumulate": 2, "keep_grads": True},
    {"ddp": {"gradient_as_bucket_view": True}, "keep_grads": True, "backend": "aot_eager"},
]
PIECES: list[tuple[dict[str, Any], str]] = [
    ({"ddp": {"find_unused_parameters": True}}, "find_unused_parameters"),
    ({"ddp": {"static_graph": True}, "accumulate": 1}, "static_graph"),
    ({"options": {"ddp": "off"}, "accumulate": 2}, "options={'ddp': 'off'}"),
]


def equal(results: list[dict[str, Any]], programs: int | None = 1) -> None:
    for result in results:
        assert result["worst"] <= 1e-12 and result["same"], result
        assert programs is None or result["programs"] == programs, result


@pytest.mark.sweep(6)
@pytest.mark.parametrize("how", WHOLE, ids=lambda how: ", ".join(map(str, how.values())))
def test_steps_are_the_eager_loops(pair: Pair, how: dict[str, Any]) -> None:
    results = pair.run(ddp_step.train, how)
    equal(results)
    assert not results[0]["why"] and "bucket" in results[0]["text"]


@pytest.mark.parametrize(("how", "text"), PIECES, ids=lambda x: x if isinstance(x, str) else "")
def test_what_only_ddp_can_do_is_told(pair: Pair, how: dict[str, Any], text: str) -> None:
    results = pair.run(ddp_step.train, {"backend": "aot_eager", **how})
    equal(results, 0)
    assert results[0]["why"] == ["DM504"] and text in results[0]["text"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_with_strides_of_their_own(pair: Pair, accumulate: int) -> None:
    for result in pair.run(ddp_step.convolutions, accumulate):
        assert result["worst"] <= 1e-5 and result["same"] and result["programs"] == 1


def test_buffers_are_sent_around(pair: Pair) -> None:
    results = pair.run(ddp_step.buffers)
    assert (
        max(r["worst"] for r in results) <= 1e-12 and results[0]["programs"] == 1
    )  # ranks part in local steps


def test_ranks_with_batches_of_their_own_sizes(pair: Pair) -> None:
    results = pair.run(ddp_step.sizes)
    equal(results, None)
    assert [r["programs"] for r in results] == [1, 3]


def test_batches_beyond_the_cache_limit_are_reduced_too(pair: Pair) -> None:
    equal(pair.run(ddp_step.beyond_the_limit), None)


@pytest.mark.parametrize("late", [False, True])
def test_one_rank_in_pieces_meets_the_others(pair: Pair, late: bool) -> None:
    results = pair.run(ddp_step.one_in_pieces, late)
    assert max(r["worst"] for r in results) <= 1e-12  # the last bit depends on who updates
    assert [r["programs"] for r in results] == [1, int(late)] and results[1]["why"] == ["DM503"]


def test_one_rank_that_cannot_makes_all_leave_it_to_ddp(pair: Pair) -> None:
    results = pair.run(ddp_step.disagree)
    equal(results, 0)
    assert [r["why"] for r in results] == [["DM504"], ["DM504"]] and "rank 1" in results[0]["text"]


def test_a_layer_that_is_not_used_any_more(pair: Pair) -> None:
    for answer in pair.run(ddp_step.loses_a_gradient):
        assert answer.startswith("DM704 not every parameter is used in one graph")


def test_a_communication_hook_that_comes_later_is_heeded(pair: Pair) -> None:
    results = pair.run(ddp_step.comm_hook)
    equal(results)
    assert results[0]["why"] == ["DM504"] and "communication hook" in results[0]["text"]


def test_a_hook_of_the_ddp_module_runs(pair: Pair) -> None:
    for result, seen in pair.run(ddp_step.module_hook):
        equal([result])
        assert seen == 2


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_bucket_is_updated_when_it_is_reduced(pair: Pair, clip: float | None) -> None:
    """All buckets start before one is waited for; clipping needs them all."""
    for events, changed in pair.run(ddp_step.order, clip):
        n = len(changed)
        assert n >= 3
        assert events == [("ready", k) for k in range(n)] + [("done", k) for k in range(n)]
        assert changed == [0] * n if clip else changed == sorted(set(changed)) and changed[0] == 0
