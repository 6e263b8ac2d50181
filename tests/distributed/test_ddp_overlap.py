"""Reduction can begin early: the first bucket is ready long before the last one. The best of several tries
counts, because other programs share the machine."""

from __future__ import annotations

import ddp_overlap
import pytest
from ranks import Pair


@pytest.mark.slow
def test_buckets_start_inside_the_compiled_backward(pair: Pair) -> None:
    for result in pair.run(ddp_overlap.fractions, "ingraph", seconds=60):
        assert result["modes"] == {"ingraph": 1} and result["buckets"] >= 4, result
        assert result["position"] <= 0.5, result
        assert min(result["fractions"]) <= 0.5, result


@pytest.mark.slow
def test_stages_let_ddps_hooks_fire_early(pair: Pair) -> None:
    for result in pair.run(ddp_overlap.fractions, "split", seconds=60):
        assert result["modes"] == {"split": 1} and result["buckets"] >= 4, result
        assert min(result["fractions"]) <= 0.8, result


@pytest.mark.slow
def test_without_either_nothing_overlaps(pair: Pair) -> None:
    for result in pair.run(ddp_overlap.fractions, "off", seconds=60):
        assert result["modes"] == {"off": 1}, result
        assert min(result["fractions"]) >= 0.6, result
