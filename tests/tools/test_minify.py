"""`minify` finds the smallest graph that fails; internal errors leave a script that repeats them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from children import run_forked

import dynamotor
from dynamotor import __main__, config
from dynamotor.base.errors import InternalError
from dynamotor.capture import frontend
from dynamotor.codegen import cpp, cpp_ops

PROGRAM = """
import torch, dynamotor
torch.manual_seed(0)
w = torch.randn(8, 8)
def f(x, n):
    y = (x @ w).relu() + 1
    z = (y.cos() * n).SPOILED
    return (z.sum(-1) @ w).exp(), y.amax(0)
dynamotor.compile(f)(torch.randn(3, 4, 8), 2)
"""


@pytest.fixture
def wrong_sinh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that compute cosh for sinh."""
    monkeypatch.setattr(cpp, "_memo", {})
    monkeypatch.setitem(cpp_ops.TEXT, "sinh", "cosh_({0})")


def _minified(tmp_path: Path, program: str) -> tuple[int, Path]:
    script = tmp_path / "train.py"
    script.write_text(program)
    return __main__.main(["minify", str(script)]), tmp_path / "train.min.py"


def test_a_wrong_kernel_is_cut_down_to_its_call(
    wrong_sinh: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, small = _minified(tmp_path, PROGRAM.replace("SPOILED", "sinh()"))
    text = capsys.readouterr().out
    assert status == 0 and "DM922: 1 of " in text, text
    source = small.read_text()
    assert (
        ".sinh()" in source
        and ".exp()" not in source
        and "@" not in source
        and small.with_suffix(".safetensors").is_file()
    )
    with config.patch(check=False), pytest.raises(InternalError, match="DM922"):  # the script repeats it
        exec(compile(source, str(small), "exec"), {"__name__": "small", "__file__": str(small)})


def test_a_script_that_fails_no_more_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_sinh: None
) -> None:
    _, small = _minified(tmp_path, PROGRAM.replace("SPOILED", "sinh()"))
    done = run_forked("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(small))
    assert done.returncode == 0 and "it does not fail here" in done.stdout  # without the planted fault


def test_a_program_that_works_is_not_blamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, small = _minified(tmp_path, PROGRAM.replace("SPOILED", "sin()"))
    assert status == 1 and "none of the 1 graphs" in capsys.readouterr().out and not small.exists()


def test_a_missing_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["minify", "/no/such.py"]) == 2 and "DM108" in capsys.readouterr().err


def test_an_internal_error_says_where_its_script_is(wrong_sinh: None, tmp_path: Path) -> None:
    with config.patch(check=True, cache_dir=str(tmp_path)), pytest.raises(InternalError) as raised:
        dynamotor.compile(lambda x: x.sinh() + 1)(torch.randn(8, 8))
    (script,) = tmp_path.glob("failures/DM922-*.py")
    assert f"a script that repeats it: {script}" in str(raised.value)
    assert "sinh()" in script.read_text() and "DM922" in script.read_text()


def test_a_backend_that_raises_leaves_a_script_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dynamotor import codegen

    def broken(*_: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(codegen, "lower_graph", broken)
    with (
        config.patch(cache_dir=str(tmp_path)),
        pytest.raises(dynamotor.BackendError, match="a script that repeats it"),
    ):
        dynamotor.compile(lambda x: x.sin() + 1)(torch.randn(8))
    assert list(tmp_path.glob("failures/DM401-*.py"))


def test_a_capture_that_fails_leaves_a_script_of_the_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text("def f(x, n):\n    return x.sin() * n\n")
    f = runpy.run_path(str(tmp_path / "program.py"))["f"]
    monkeypatch.setattr(frontend, "finished", lambda *_: {}["planted"])
    with (
        config.patch(cache_dir=str(tmp_path)),
        pytest.raises(InternalError, match="a script that repeats it") as raised,
    ):
        dynamotor.compile(f)(torch.randn(4), 2)
    assert raised.value.code == "DM900"
    monkeypatch.undo()
    (script,) = tmp_path.glob("failures/DM900-*.py")
    runpy.run_path(str(script))  # without the planted fault it runs
    monkeypatch.setattr(frontend, "finished", lambda *_: {}["planted"])
    with (
        config.patch(cache_dir=str(tmp_path)),
        pytest.raises(InternalError, match="no script that repeats it could be written"),
    ):
        dynamotor.compile(lambda x: x.sin())(torch.randn(4))


def test_errors_of_the_users_leave_none(tmp_path: Path) -> None:
    def prints(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x.sin()

    with config.patch(cache_dir=str(tmp_path)), pytest.raises(dynamotor.CaptureError):
        dynamotor.compile(prints, fullgraph=True)(torch.randn(8))
    assert not list(tmp_path.glob("failures/*"))
