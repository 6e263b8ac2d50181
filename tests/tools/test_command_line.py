"""`python -m dynamotor` with and without the folder `bench` beside it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

import dynamotor
from dynamotor import __main__
from dynamotor.base import checkout, platform, probe
from dynamotor.base.config import config
from dynamotor.base.errors import UsageError


def test_the_bench_of_a_checkout_says_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.main(["bench", "--help"])
    assert ended.value.code == 0 and "--compilers" in capsys.readouterr().out


def test_without_the_folder_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="DM122"):
        checkout.bench("models", root=tmp_path)


def test_costly_checks_are_those_of_a_checkout(tmp_path: Path) -> None:
    """`verify` in a wheel does without them; in a checkout, a kernel's text is gone through."""
    with config.patch(verify=True):
        checkout.prove("no such check", root=tmp_path)
        with pytest.raises(AttributeError):
            checkout.prove("no such check")
    with config.patch(verify=False):
        checkout.prove("no such check")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(SystemExit):
        __main__.main(["doctor", "--nothing"])


def test_a_program_runs_with_its_torch_compile_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\ncompiled = torch.compile(lambda x: x * 2)\n"
        "print(compiled(torch.ones(2)).tolist(), type(compiled).__module__, sys.argv[1:])\n"
    )
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", list(sys.path))
    assert __main__.main(["run", "--replace-torch-compile", str(program), "--epochs", "2"]) == 0
    assert capsys.readouterr().out == "[2.0, 2.0] dynamotor._C ['--epochs', '2']\n"


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"dynamotor {dynamotor.__version__}\n"


def test_the_metadata_names_the_version_and_the_versions_that_the_package_checks() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    pythons = {f"Programming Language :: Python :: {a}.{b}" for a, b in platform.SUPPORTED_PYTHONS}
    (oldest, newest), first, last = (
        probe.TESTED,
        platform.SUPPORTED_PYTHONS[0],
        platform.SUPPORTED_PYTHONS[-1],
    )
    assert project["version"] == dynamotor.__version__ and pythons <= set(project["classifiers"])
    assert project["requires-python"] == f">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    assert f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}" in project["dependencies"]
