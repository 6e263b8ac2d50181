"""Programs of DTensors are one graph with their collectives, and eager's, on both ranks."""

from __future__ import annotations

import pytest
from dtensor_programs import PROGRAMS, RANDOM, compared, drawn, trained, whole_steps
from ranks import Pair


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_dtensors_is_one_graph(pair: Pair, name: str) -> None:
    for result in pair.run(compared, name):
        assert result["same"], result
        assert result["graphs"] == 1, result
        assert not result["left"], result


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "by seed"])
@pytest.mark.parametrize("name", RANDOM)
def test_replicas_draw_the_same_numbers_where_they_do_in_eager(pair: Pair, name: str, tracked: bool) -> None:
    for result in pair.run(drawn, name, tracked):
        assert all(result), result


def test_a_tensor_parallel_block_trains_in_one_graph(pair: Pair) -> None:
    for result in pair.run(trained, 3):
        assert result["same"], result
        assert result["graphs"] == 1, result
        assert not result["left"], result


def test_a_compiled_step_of_a_tensor_parallel_block_runs_in_pieces(pair: Pair) -> None:
    for result in pair.run(whole_steps):
        assert result["same"] and "DM502" in result["text"], result
