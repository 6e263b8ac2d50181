"""The example that trains digits over two processes: compiled losses follow eager ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ddp_digits.py"


@pytest.mark.slow
def test_eager_and_compiled_losses_stand_side_by_side() -> None:
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(EXAMPLE.parents[1]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--epochs", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes" in done.stdout and "gradients were reduced: {'ingraph': 1}" in done.stdout, (
        done.stdout
    )
    losses = [
        (float(a), float(b)) for a, b in re.findall(r"^ +\d+ +([\d.]+) +([\d.]+) ", done.stdout, re.MULTILINE)
    ]
    assert len(losses) == 1 and all(abs(a - b) <= 1e-4 and a < 2.3 for a, b in losses), done.stdout
    right = [float(x) for x in re.findall(r"(?:eager|compiled) ([\d.]+)%", done.stdout)]
    assert len(right) == 2 and min(right) > 50.0, done.stdout
