"""Facts of ops that no schema tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_each_op_that_raises_as_its_data_are_is_listed() -> None:
    """The graph has to break before such an op where the program may catch the error."""
    script = Path(__file__).with_name("ops_out_of_range.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert not [line for line in run.stdout.splitlines() if line.startswith("unlisted")]
