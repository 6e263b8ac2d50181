"""Arguments, settings and files that mean nothing are refused with a code, and errors cross processes."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from children import run_forked

import dynamotor
from dynamotor import BackendError, BuildError, CaptureError, UsageError
from dynamotor.__main__ import main
from dynamotor.base import errors
from dynamotor.base.config import config
from dynamotor.base.errors import DynamotorError, InternalError, UserLine, XlaError


@pytest.mark.parametrize(
    "kind", [UsageError, CaptureError, BuildError, BackendError, XlaError, InternalError]
)
def test_errors_are_pickled_and_copied(kind: Any) -> None:
    error = kind("DM100", "what", why="why", cure="cure", where=UserLine("file", 3, "f"))
    error.add("more")
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(found) is kind and str(found) == str(error) and vars(found) == vars(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", -4),
        ("run_while_building", "foo"),
        ("log", "brakes"),
        ("log", "breaks,brakes"),
        ("ddp", "all"),
        ("target", "rust"),
        ("cache_megabytes", -1),
        ("debug", -1),
    ],
)
def test_settings_that_mean_nothing(name: str, value: Any) -> None:
    before = getattr(config, name)
    for use in (
        lambda: setattr(config, name, value),
        lambda: config.update(**{name: value}),
        lambda: dynamotor.compile(torch.sin, options={name: value}),
    ):
        with pytest.raises(UsageError, match="DM141"):
            use()
    assert getattr(config, name) == before


def test_arguments_that_mean_nothing() -> None:
    x = torch.ones(3, 4)
    for code, use in (
        ("DM144", lambda: dynamotor.mark_dynamic(x, 0, min=9, max=2)),
        ("DM144", lambda: dynamotor.mark_dynamic(x, ["a"])),  # type: ignore[arg-type]
        ("DM144", lambda: dynamotor.mark_static([x], 0)),  # type: ignore[arg-type]
        ("DM107", lambda: dynamotor.register_backend("x")),  # type: ignore[call-overload]
        ("DM146", lambda: dynamotor.compile(torch.sin, options=["threads"])),  # type: ignore[call-overload]
        ("DM104", lambda: dynamotor.compile(torch.sin, mode=3)),  # type: ignore[call-overload]
        ("DM146", lambda: dynamotor.compile(torch.sin, shapes_spec={})),  # type: ignore[call-overload]
        ("DM146", lambda: dynamotor.compile(torch.sin, dynamic_shapes={})),  # type: ignore[call-overload]
        ("DM146", lambda: dynamotor.compile(torch.sin, recompile_limit=0)),
        ("DM145", lambda: dynamotor.compile(torch.nn.Linear)),
    ):
        with pytest.raises(UsageError, match=code):
            use()
    assert torch.nn.Linear.__call__ is torch.nn.Module.__call__
    with pytest.raises(AttributeError, match="treads"):
        config.treads = 3


def test_arguments_of_torch_compile_are_taken() -> None:
    x = torch.ones(3)
    compiled = dynamotor.compile(
        torch.sin, backend=None, name="sine", recompile_limit=2, isolate_recompiles=True, shapes_spec=None
    )
    assert torch.equal(compiled(x), torch.sin(x))


def test_a_class_of_the_program_is_compiled() -> None:
    @dynamotor.compile(backend="eager")
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    assert torch.equal(Net()(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.slow
def test_settings_of_the_environment_that_mean_nothing(tmp_path: Path) -> None:
    program = "import dynamotor; print(dynamotor.config.debug, repr(dynamotor.config.log), dynamotor.config.threads)"
    wrong = {
        "DYNAMOTOR_DEBUG": "abc",
        "DYNAMOTOR_LOG": "brakes",
        "DYNAMOTOR_RUN_WHILE_BUILDING": "foo",
        "DYNAMOTOR_TRACE": str(tmp_path / "none" / "trace.jsonl"),
        "DYNAMOTOR_REPORT": str(tmp_path / "none" / "report.html"),
    }
    done = run_forked(program, **wrong)
    assert done.stdout.split() == ["0", "''", "0"]
    for name in (
        "DYNAMOTOR_DEBUG",
        "DYNAMOTOR_LOG",
        "DYNAMOTOR_RUN_WHILE_BUILDING",
        "DYNAMOTOR_TRACE",
        "DYNAMOTOR_REPORT",
    ):
        assert f"{name} is ignored" in done.stderr


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def counts(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x

    with pytest.raises(UsageError, match="DM142"):
        dynamotor.report(counts, torch.ones(2), path=tmp_path / "none" / "report.html")
    assert not calls


def test_a_bound_below_zero_removes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "prune", "--megabytes", "-1"]) == 2
    assert "DM143" in capsys.readouterr().err


@pytest.mark.slow
def test_a_program_keeps_its_own_bench(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text("word = 'the program'\n")
    (tmp_path / "program.py").write_text("import bench; print(bench.word)\n")
    done = subprocess.run(
        [sys.executable, "-m", "dynamotor", "run", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(dynamotor.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split("\n")[0] == "the program", done.stderr


def test_without_a_compiler_programs_run(tmp_path: Path) -> None:
    program = (
        "import json, torch, dynamotor\n"
        "net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4)\n"
        "found = [dynamotor.compile(net)(x), dynamotor.compile(net, fullgraph=True)(x)]\n"
        "found[0].sum().backward()\n"
        "found.append(dynamotor.compile_fx(torch.fx.symbolic_trace(net), [x])(x))\n"
        "print(json.dumps([torch.allclose(y, net(x)) for y in found]))\n"
    )
    done = run_forked(program, PATH="/nowhere", CXX="", DYNAMOTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True] * 3
    assert done.stderr.count("DM301") == 1


def test_an_unknown_backend_gets_the_nearest_name_and_no_names_of_tests() -> None:
    with pytest.raises(UsageError, match="did you mean 'native'") as raised:
        dynamotor.compile(torch.sin, backend="natve")
    assert "auto" in str(raised.value) and "TESTING_ONLY" not in str(raised.value)
    assert "auto" in dynamotor.list_backends()
    assert not [name for name in dynamotor.list_backends() if "TESTING_ONLY" in name]


def test_every_error_and_warning_is_public() -> None:
    defined = {
        n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, (DynamotorError, Warning))
    }
    assert defined <= set(dynamotor.__all__)


def test_a_positional_tensor_is_exported() -> None:
    assert dynamotor.export(torch.nn.Linear(2, 2), torch.ones(3, 2)).graph_module is not None
