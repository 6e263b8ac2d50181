"""An op that a row of "Where to add" adds to the compiler (tests/test_where_to_add.py), on the xla device."""

from __future__ import annotations

from pathlib import Path

from children import run_forked
from overlay import IN_COPY, overlay

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
    done = run_forked(
        IN_COPY + PROGRAM, *overlay(tmp_path, {"xla/dynamotor/xla/ops_pointwise.py": LOWERING}, {})
    )
    assert "fallbacks []" in done.stdout, done.stdout + done.stderr
