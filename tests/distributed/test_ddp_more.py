"""What changes while training goes on, and what compiled DDP must leave as it is."""

from __future__ import annotations

import ddp_more
import pytest
from ranks import Pair


@pytest.mark.parametrize("what", ["gradient hook", "comm hook"])
def test_hooks_registered_later_are_heeded(pair: Pair, what: str) -> None:
    for worst, same in pair.run(ddp_more.changes, what):
        assert worst <= 1e-12 and same


def test_uneven_inputs_under_join(pair: Pair) -> None:
    assert max(pair.run(ddp_more.join)) <= 1e-12


@pytest.mark.parametrize("late", [False, True])
def test_autograd_grad_gives_the_ranks_own_gradients(pair: Pair, late: bool) -> None:
    for result in pair.run(ddp_more.autograd_grad, late):
        assert max(result) <= 1e-12


def test_calls_beyond_the_cache_limit_are_reduced_too(pair: Pair) -> None:
    for worst, uncompiled in pair.run(ddp_more.many_shapes):
        assert worst <= 1e-12 and uncompiled > 0


def test_batches_of_changing_sizes_are_two_programs(pair: Pair) -> None:
    for worst, captured, modes in pair.run(ddp_more.changing_rows):
        assert worst <= 1e-12 and captured == 2 and modes == {"ingraph": 2}


def test_copies_train_like_the_original(pair: Pair) -> None:
    for differences in pair.run(ddp_more.copies):
        assert max(differences) <= 1e-12


def test_gradients_return_to_the_same_memory(pair: Pair) -> None:
    for pieces, buckets in pair.run(ddp_more.memory):
        assert pieces <= 2 * buckets


def test_a_compiled_function_around_a_ddp_module(pair: Pair) -> None:
    for worst, modes, breaks in pair.run(ddp_more.called_inside):
        assert worst <= 1e-12 and modes == {"ingraph": 1} and breaks == 1


def test_a_parameter_frozen_later_is_an_error_with_a_code(pair: Pair) -> None:
    assert pair.run(ddp_more.frozen_later) == ["DM704", "DM704"]


def test_two_modules_that_feed_each_other(pair: Pair) -> None:
    for worst, same, modes in pair.run(ddp_more.two_modules):
        assert worst <= 1e-12 and same and modes == {"ingraph": 2}


def test_a_tied_weight_sits_in_the_bucket_of_its_earliest_use(pair: Pair) -> None:
    for last, times in pair.run(ddp_more.tied_bucket):
        assert "embed.weight" in last and times == 1


def test_a_backward_with_collectives_is_no_cuda_graph(pair: Pair) -> None:
    for worst, fallback in pair.run(ddp_more.graphs_of_cuda):
        assert worst <= 1e-12 and fallback["cudagraphs.collectives"] == 1, fallback
