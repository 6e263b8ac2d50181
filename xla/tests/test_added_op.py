"""An op that a row of "Where to add" adds to the compiler (tests/test_where_to_add.py), on the xla device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from overlay import overlay

LOWERING = """

@op(torch.ops.dummy.gate)
def _gate(x, y):
    return x / (1 + jnp.exp(-y))
"""
PROGRAM = """
import dummy_op, torch, dynamotor
import dynamotor.xla
from dynamotor.xla import metrics

x = torch.linspace(-2, 2, 12).view(3, 4)
want = torch.ops.dummy.gate(x, x[0])
on_device = torch.ops.dummy.gate(x.to("xla"), x[0].to("xla"))
torch.testing.assert_close(on_device.cpu(), want)
compiled = dynamotor.compile(torch.ops.dummy.gate, backend="xla")
torch.testing.assert_close(compiled(x, x[0]), want)
print("fallbacks", [name for name in metrics.all_counters() if name.startswith("aten::") or "dummy" in name])
"""


def test_an_added_op_runs_on_the_device(tmp_path: Path) -> None:
    environment = overlay(tmp_path, {"xla/dynamotor/xla/ops_pointwise.py": LOWERING}, {})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert "fallbacks []" in done.stdout, done.stdout + done.stderr
