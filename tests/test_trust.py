"""The table of docs/trust.md names tests that exist, and no file is unpickled."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import dynamotor

ROOT = Path(__file__).parents[1]


NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?`", (ROOT / "docs/trust.md").read_text())


@pytest.mark.regression
def test_every_test_of_the_table_exists() -> None:
    assert len(NAMED) > 50
    for file, function, case in NAMED:
        text = (ROOT / file).read_text()
        made = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        assert function in made, f"{file}::{function}"
        assert not case or f"def {case}(" in text or f'"{case}"' in text, f"{file}::{function}[{case}]"


@pytest.mark.regression
def test_no_file_is_unpickled() -> None:
    """Pickles go through pipes (the Triton worker) and between ranks only; torch.load reads data alone."""
    root = Path(dynamotor.__file__).parents[1]
    files = [path for part in ("dynamotor", "xla/dynamotor") for path in (root / part).rglob("*.py")]
    users = {path.name for path in files if "pickle.load" in path.read_text()}
    assert users == {"triton_worker.py", "collectives.py"}
