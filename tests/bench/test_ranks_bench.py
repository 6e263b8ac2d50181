"""`bench.fsdp` and `bench.parallel` run at tiny sizes on two gloo ranks, and their table compares ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import ranks

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("tool, rows", [("bench.fsdp", ["fsdp"]), ("bench.parallel", ["tp", "cp"])])
def test_all_ways_of_a_row_have_the_same_losses(tool: str, rows: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", tool]
    ways = "eager,dynamotor blocks,dynamotor whole,compile_step"
    given = ["--device", "cpu", "--small", "--steps", "4", "--ways", ways, "--json", str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*run, *given], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())["rows"]
    assert [row["row"] for row in found] == [name for name in rows for _ in range(4)]
    for row in found:
        assert row["loss"] == pytest.approx(found[0]["loss"], rel=1e-5), row


def test_a_way_is_compared_with_the_faster_way_of_torch_compile() -> None:
    def row(way: str, ms: float, name: str = "tp") -> dict:
        return {"row": name, "way": way, "ms": [ms, ms, ms], "first_s": 1.0, "graphs": 1, "loss": [2.0, 1.0]}

    rows = [row("torch.compile blocks", 40.0), row("torch.compile whole", 50.0), row("dynamotor whole", 20.0)]
    assert ranks._line(rows, rows[2])[4] == "0.500"
    assert ranks._line(rows, row("eager", 20.0, "cp"))[4] == ""
