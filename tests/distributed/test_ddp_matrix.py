"""Gradients of compiled DDP are eager DDP's, ranks are bit-equal, and graphs are compiled the way they should
be.
"""

from __future__ import annotations

import ddp_cases
import pytest
import torch
from ddp_cases import CASES, compare, whole_batch
from ranks import Pair

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1}


def check(results: list[dict], name: str, mode: str = "auto") -> None:
    case = CASES[name]
    for result in results:
        assert result["gradients"] <= TOLERANCE[case.dtype], result
        assert result["buffers"] <= TOLERANCE[case.dtype], result
        assert result["same"], result
        assert result["captured"] > 0, result
        expected = case.expect if mode == "auto" else mode
        if expected == "ingraph":
            assert result["buckets"] > 0, result
        assert set(result["modes"]) == {expected}, result
        if mode == "auto":
            assert {k for k in result["fallback"] if k.startswith("ddp.")} == (
                {f"ddp.{case.reason}"} if case.reason else set()
            )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_eager_ddps(pair: Pair, name: str) -> None:
    check(pair.run(compare, name, "outside", "native"), name)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_module_inside_ddp(pair: Pair, name: str) -> None:
    check(pair.run(compare, name, "inside", "aot_eager"), name)


@pytest.mark.parametrize(
    "name", ["plain", "keywords", "tied", "frozen", "buffers", "no_sync", "bf16", "break", "two forwards"]
)
@pytest.mark.parametrize("mode", ["split", "off"])
def test_modes_asked_for(pair: Pair, name: str, mode: str) -> None:
    check(pair.run(compare, name, "outside", "native", mode), name, mode)


@pytest.mark.parametrize("name", ["plain", "tied", "keywords", "break"])
def test_gradients_are_those_of_one_process_with_the_whole_batch(pair: Pair, name: str) -> None:
    assert max(pair.run(whole_batch, name)) <= 1e-12


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_the_eager_backend_needs_no_help(pair: Pair, name: str) -> None:
    for result in pair.run(compare, name, "outside", "eager"):
        assert result["gradients"] <= 1e-9 and result["same"], result


assert ddp_cases
