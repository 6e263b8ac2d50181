"""The script for machines with GPUs, run on a CPU: it ends well, and everything that it writes is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "ddp_check.sh"


@pytest.mark.slow
def test_the_script_checks_and_measures(tmp_path: Path) -> None:
    command = [
        str(SCRIPT),
        str(tmp_path),
        "--device",
        "cpu",
        "--tiny",
        "--budget",
        "150",
        "--cases",
        "plain",
        "--modes",
        "eager,ingraph",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env=dict(os.environ, PYTHON=sys.executable)
    )
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    rows = json.loads((tmp_path / "matrix.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["ok"] for row in rows), rows
    bench = json.loads((tmp_path / "ddp.json").read_text())
    assert [(row["mode"], row["ok"]) for row in bench["rows"]] == [("eager", True), ("ingraph", True)], bench[
        "rows"
    ]
    (cell,) = json.loads((tmp_path / "ddp-overlap.json").read_text())["cells"]
    assert all(mode["count"] >= 2 and mode["lanes"]["kernels"] for mode in cell["modes"].values()), cell
    assert ElementTree.parse(tmp_path / "ddp-overlap.svg").getroot().tag.endswith("svg")
    assert "ingraph" in done.stdout
