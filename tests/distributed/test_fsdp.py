"""Training with `fully_shard` is eager FSDP2's: gathers and reductions are nodes of the compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fsdp_programs import (
    MODELS,
    STEPS,
    compare,
    compare_as_on_a_gpu,
    dies,
    failed_backward,
    failed_forward,
    modes_of_ranks,
    refusals,
    saved_weights,
    updates_in_parts,
    weights_alive,
    whole_steps,
)
from ranks import Pair

# In float32 kernels of ours round elsewhere than eager's.
ROUNDED = {"smaller types", "output type"}
# Steps, or models, whose programs leave some hooks to PyTorch.
HOOKS = {"break", "by_hand", "kept_behind_backwards"}


def check(results: list[dict], name: str, how: str) -> None:
    for result in results:
        assert result["worst"] <= (1e-5 if name in ROUNDED else 1e-11), result
        assert result["sharded"] and (name in HOOKS or not result["hooks"]), result
        if name not in HOOKS and how == "whole":
            assert result["graphs"] == result["sharded"], result


@pytest.mark.sweep(8)
@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_under_the_hooks(pair: Pair, name: str, how: str) -> None:
    for backend in ("aot_eager", "native"):
        check(pair.run(compare, name, "plain", how, backend), name, how)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize("step", STEPS)
def test_steps_of_all_kinds_are_those_of_the_hooks(pair: Pair, step: str, how: str) -> None:
    check(pair.run(compare, "plain", step, how), step, how)


@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize("name", ["plain", "second dimension", "kept"])
def test_shards_are_gathered_and_reduced_on_streams_as_under_the_hooks(
    pair: Pair, name: str, how: str
) -> None:
    for step in ("plain", "accumulation"):
        check(pair.run(compare_as_on_a_gpu, name, step, how), name, how)


def test_one_graph_holds_the_whole_model_and_gathers_again_in_the_backward(pair: Pair) -> None:
    forward, backward = ["gather"] * 4, ["gather"] * 3 + ["reduce"] * 4
    for result in pair.run(compare, "plain", "plain", "whole"):
        assert result["graphs"] == 1 and sorted(result["sent"]) == sorted(3 * [*forward, *backward])
    for result in pair.run(compare, "kept", "plain", "whole"):
        assert sorted(result["sent"]) == sorted(3 * (["gather"] * 4 + ["reduce"] * 4))


def test_gathered_weights_are_saved_for_the_backward_only_where_they_are_kept(pair: Pair) -> None:
    for plain, kept in pair.run(saved_weights):
        assert plain == ["head.weight"] and len(kept) == 7


def test_gathered_weights_are_freed_behind_their_last_use(pair: Pair) -> None:
    for found in pair.run(weights_alive):  # the root's, and those of the block that runs or comes next
        assert len(found) == 7 and max(n for _, n in found) <= 3, found


@pytest.mark.slow
def test_ranks_may_run_hooks_and_compiled_code_side_by_side(pair: Pair) -> None:
    for worst in pair.run(modes_of_ranks):
        assert worst <= 1e-11


@pytest.mark.slow
def test_a_backward_that_raised_leaves_nothing_behind(pair: Pair) -> None:
    for worst in pair.run(failed_backward):
        assert worst <= 1e-11


def test_a_forward_that_raised_sends_nothing_again(pair: Pair) -> None:
    for gathered_again, worst in pair.run(failed_forward):
        assert gathered_again == 0 and worst <= 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_died_is_a_coded_error(where: str) -> None:
    pair = Pair(group_timeout=4.0)
    try:
        for pipe in pair.pipes:
            pipe.send((dies, (where,)))
        assert pair.answer(pair.pipes[0], 20) == "DM703"
    finally:
        pair.kill()


def test_a_compiled_step_updates_behind_the_reductions(pair: Pair) -> None:
    for result in pair.run(whole_steps):
        assert result["worst"] <= 1e-11 and "DM504" in result["text"], result
        assert result["sent"] == 4 * 11, result


def test_adam_updates_each_group_behind_its_own_reduction(pair: Pair) -> None:
    for (parts, sizes), (whole, one) in pair.run(updates_in_parts):
        assert parts <= 1e-11 and whole <= 1e-11
        assert sizes[-1] == 0 and len(sizes) == 5 and one == (sum(sizes),)


def test_cases_of_the_hooks_alone_are_reported(pair: Pair) -> None:
    for reasons in pair.run(refusals):
        for case, (worst, texts) in reasons.items():
            assert worst <= 1e-11 and any("DM460" in t and case in t for t in texts), (case, worst, texts)


@pytest.fixture(scope="module")
def four() -> Iterator[Pair]:
    ranks = Pair(size=4)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize("step", ["plain", "accumulation", "clipping", "checkpoints"])
def test_shards_with_replicas(four: Pair, step: str, how: str) -> None:
    check(four.run(compare, "plain", step, how, "native", "HSDP"), step, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize("step", ["plain", "accumulation"])
def test_shards_of_tensor_parallel_layers(four: Pair, step: str, how: str) -> None:
    check(four.run(compare, "plain", step, how, "native", "tensor parallel"), step, how)
