"""Continuous integration runs the slow tests of the rooms that a landing changes."""

from __future__ import annotations

import subprocess
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOADER = SourceFileLoader("changed_rooms", str(ROOT / ".ci" / "changed_rooms"))


@pytest.mark.parametrize(
    "changed, tests",
    [
        (["dynamotor/lower/ir.py", "dynamotor/lower/fusion.py"], ["tests/lower"]),
        (["dynamotor/csrc/guards.c"], ["tests/capture", "tests/runtime"]),
        (["xla/dynamotor/xla/rng.py"], ["xla/tests"]),
        (["fuzz/late.py", "bench/size.py"], ["tests/fuzz", "tests/bench"]),
        (
            ["dynamotor/step/host.py", "tests/test_changed_rooms.py"],
            ["tests/test_changed_rooms.py", "tests/step"],
        ),
        (["README.md", "tests/gone/test_gone.py"], []),
    ],
)
def test_changed_files_name_their_tests(changed: list[str], tests: list[str]) -> None:
    script = module_from_spec(spec_from_loader("changed_rooms", LOADER))
    LOADER.exec_module(script)
    assert script.tests_of(changed) == tests


def test_a_module_above_the_rooms_names_the_tests_above_the_rooms() -> None:
    script = module_from_spec(spec_from_loader("changed_rooms", LOADER))
    LOADER.exec_module(script)
    assert "tests/test_api.py" in script.tests_of(["dynamotor/api.py"])


def test_the_script_of_continuous_integration_is_shell() -> None:
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)
