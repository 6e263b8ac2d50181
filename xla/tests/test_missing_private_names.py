"""A private name of PyTorch that is missing turns the device off, and nothing of the core."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
from children import run_forked  # noqa: E402

from dynamotor.base import probe  # noqa: E402
from dynamotor.xla import compat  # noqa: E402


def test_the_device_needs_its_rows_and_the_core_does_not() -> None:
    rows = [row.paths[0] for row in probe.table if row.off is compat.XLA and row.instead is probe.MISSING]
    assert len(rows) > 20
    program = """
import torch, dynamotor
x = torch.ones(2)
assert dynamotor.compile(lambda x: x * 2, fullgraph=True)(x).tolist() == [2, 2]
try:
    import dynamotor.xla
except Exception as error:
    print(error)
"""
    done = run_forked(program, DYNAMOTOR_HIDE_NAMES="torch._register_device_module")
    assert "DM150" in done.stdout and "the device xla and its backends cannot be used" in done.stdout, done
