"""Models that are divided over two ranks (FSDP2, HSDP, tensor, context and pipeline parallel) train compiled as the
whole model does in one process: losses, gradients, checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parallel_programs import SCHEDULES, WAYS, beside_eager, compared, losses, pipelined, regions
from ranks import Pair


def check(results: list[dict[str, Any]], graphs: int, more: int = 0) -> None:
    for result in results:
        assert max(result["found"].values()) <= 1e-11, result
        assert graphs <= result["graphs"] <= graphs + more and not result["left"], result


@pytest.mark.sweep(1)
@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize("name", WAYS)
def test_divided_models_train_as_the_whole_one(pair: Pair, name: str, how: str, tmp_path: Path) -> None:
    check(pair.run(compared, name, how, str(tmp_path)), 1 if how == "whole" else 2)


@pytest.mark.parametrize("name", [name for name in WAYS if name != "context parallel"])
def test_one_rank_may_run_eager_code_beside_compiled_code(pair: Pair, name: str, tmp_path: Path) -> None:
    """Messages and their order are those of eager."""
    for result in pair.run(compared, name, "one rank", str(tmp_path)):
        assert max(result["found"].values()) <= 1e-11 and not result["left"], result


def test_one_rank_may_run_ring_attention_in_eager(pair: Pair) -> None:
    for apart in pair.run(beside_eager):
        assert apart <= 1e-11


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_compiled_stages_of_a_pipeline_train_as_the_whole_model(
    pair: Pair, name: str, tmp_path: Path
) -> None:
    # PyTorch 2.11 asks for the sizes of results by a call without gradients.
    check(pair.run(pipelined, name, str(tmp_path)), 1, more=1)


def test_regions_of_context_parallel_compile_once_for_each_setting(pair: Pair) -> None:
    for result in pair.run(regions):
        assert result["worst"] <= 1e-11 and result["graphs"] == [2, 1, 0, 0], result


def test_a_loss_is_parallel_where_eagers_is(pair: Pair) -> None:
    for result in pair.run(losses):
        assert all(same and error <= 1e-5 for same, error in result), result
