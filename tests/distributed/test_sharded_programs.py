"""Training with sharded parameters (FSDP2, tensor parallel plans) is eager's, on both ranks."""

from __future__ import annotations

import pytest
from ranks import Pair
from sharded_programs import PLANS, differences


@pytest.mark.sweep(6)
@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize("plan", PLANS)
def test_steps_are_eagers(pair: Pair, plan: str, how: str) -> None:
    # In bfloat16 kernels of ours round elsewhere than eager's: how far, tests of the kernels say.
    for backend in ("eager",) if "bfloat16" in plan else ("eager", "native"):
        for result in pair.run(differences, plan, how, backend):
            assert result["worst"] <= 1e-5, (backend, result)
            assert result["graphs"] == (1 if how == "whole" else 3), (backend, result)
