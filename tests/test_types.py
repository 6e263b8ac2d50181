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
sys.path.append(str(ROOT / "tools"))
from count_types import counts  # noqa: E402

PROGRAM = ROOT / "tests/support/typed_program.py"
WRONG = {n for n, line in enumerate(PROGRAM.read_text().split("\n"), 1) if line.endswith("# wrong")}


@pytest.mark.slow
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


# Comments `type: ignore`, and the share of annotations that are `Any` (percent): `python tools/count_types.py`. The
# limits only go down.
LIMITS = {
    ".": (1, 17),
    "autograd": (3, 12),
    "base": (2, 8),
    "capture": (14, 11.2),
    "codegen": (1, 3.2),
    "distributed": (3, 10),
    "graph": (5, 18.7),
    "lower": (1, 5),
    "runtime": (0, 3),
    "step": (3, 16),
    "tools": (0, 14.5),
    "xla": (21, 15),
}


def test_ignored_types_and_any_do_not_increase() -> None:
    rows = counts()
    assert rows.keys() == LIMITS.keys()
    over = {
        room: row
        for room, row in rows.items()
        if row["ignored"] > LIMITS[room][0] or 100 * row["any"] / row["all"] > LIMITS[room][1]
    }
    assert not over
