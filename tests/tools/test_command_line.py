"""`python -m dynamotor`, and the programs of the development package `bench` that it starts."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import torch

import dynamotor
from bench import tool
from dynamotor import __main__
from dynamotor.base import development, platform, probe
from dynamotor.base.config import config
from dynamotor.base.errors import UsageError


@pytest.mark.slow
def test_bench_commands_run_the_package_beside_the_compiler(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench").mkdir()  # another `bench` in the current folder
    (tmp_path / "bench" / "__main__.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["bench", "--help"]) == 0
    assert "--compilers" in capfd.readouterr().out


def test_a_bench_command_without_the_package_is_an_error_with_its_cure(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="(?s)DM122.*clone the repository"):
        __main__.run_program("demo", [], root=tmp_path)


def test_registered_checks_run_under_verify_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(development, "functions", {"noted": calls.append})
    for verify in (True, False):
        with config.patch(verify=verify):
            development.verify("noted", 1)
            development.verify("not registered", 2)
    assert calls == [1]


def test_kernels_on_cpu_tensors_need_the_registered_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(development, "functions", {})
    with config.patch(target="triton", strict=True), pytest.raises(UsageError, match="DM735"):
        dynamotor.compile(lambda x: x.sin() * 3 + 0.25)(torch.ones(5))


def test_bench_tools_write_figures_only_where_they_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tool.write_json(None, {"ms": 1})
    assert not list(tmp_path.iterdir())
    tool.write_json(tmp_path / "figures.json", {"ms": 1})
    assert tool.read_json(tmp_path / "figures.json") == {"ms": 1} and len(list(tmp_path.iterdir())) == 1


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
    assert {"Homepage", "Documentation", "Issues", "Changelog"} <= project["urls"].keys()
    module, name = project["scripts"]["dynamotor"].split(":")
    assert module == __main__.__name__ and callable(getattr(__main__, name))
    xla = tomllib.loads((Path(__file__).parents[2] / "xla" / "pyproject.toml").read_text())["project"]
    assert xla["version"] == project["version"] and f"dynamotor=={project['version']}" in xla["dependencies"]
    assert f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}" in project["dependencies"]
