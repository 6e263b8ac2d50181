"""Facts of ops that no schema tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynamotor.graph.op_facts import draws


@pytest.mark.slow
def test_each_op_that_raises_as_its_data_are_is_listed() -> None:
    """The graph has to break before such an op where the program may catch the error."""
    script = Path(__file__).with_name("ops_out_of_range.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert not [line for line in run.stdout.splitlines() if line.startswith("unlisted")]


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_attention_draws_for_dropout_alone(p: float) -> None:
    q = torch.zeros(1, 1, 2, 4)
    op = torch.ops.aten.scaled_dot_product_attention.default
    assert draws(op, (q, q, q, None, p), {}) is (p > 0) is draws(op, (q, q, q), {"dropout_p": p})
    assert draws(torch.ops.aten.native_dropout.default, (q, 0.0, True), {})
