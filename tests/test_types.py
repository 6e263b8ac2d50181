"""mypy over the package, and type checkers over a user's program."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dynamotor.base.config import Config, Settings

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tests/support/typed_program.py"
WRONG = {n for n, line in enumerate(PROGRAM.read_text().split("\n"), 1) if line.endswith("# wrong")}


def test_mypy_finds_nothing_but_the_wrong_lines_of_a_users_program() -> None:
    """One run: the program needs the types of the whole package."""
    parts = ["dynamotor", "xla/dynamotor", str(PROGRAM.relative_to(ROOT))]
    done = subprocess.run([sys.executable, "-m", "mypy", *parts], cwd=ROOT, capture_output=True, text=True)
    errors = re.findall(r"^(.*?):(\d+): error", done.stdout, re.MULTILINE)
    assert {(path, int(n)) for path, n in errors} == {(parts[-1], n) for n in WRONG}, (
        done.stdout + done.stderr
    )


def test_typed_settings_are_the_fields_of_config() -> None:
    assert list(Settings.__annotations__) == list(Config.__annotations__)
    assert {name: str(kind.__forward_arg__) for name, kind in Settings.__annotations__.items()} == (
        Config.__annotations__
    )


def test_pyright_checks_a_users_program(tmp_path: Path) -> None:
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not installed")
    settings = {"extraPaths": [str(ROOT)], "pythonVersion": "3.11", "include": ["program.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    shutil.copy(PROGRAM, tmp_path / "program.py")
    command = [pyright, "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    rows = json.loads(done.stdout)["generalDiagnostics"]
    errors = {row["range"]["start"]["line"] + 1 for row in rows if row["severity"] == "error"}
    assert errors == WRONG, done.stdout
