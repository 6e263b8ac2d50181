"""mypy over the package, beside the other tests: it takes one core for as long as a hundred of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_mypy_finds_nothing() -> None:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "dynamotor"], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
