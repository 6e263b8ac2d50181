"""The operator database tool: workers that answer, die and hang, runs that go on where an earlier one
stopped.
"""

import json
import sys
import types

import pytest

from bench import gpu_opinfo


class Played:
    """A worker that passes every op, but dies of one and never answers for another."""

    lines = []

    def __init__(self):
        self.line = ""
        self.process = types.SimpleNamespace(poll=lambda: 1 if "die" in self.name else None)

    def send(self, line):
        self.line = line
        self.lines.append(line)
        return True

    @property
    def name(self):
        return OPS[int(self.line.split()[0])].name

    def next(self, deadline):
        if not self.line:
            return {"ready": 1}
        if self.name in ("die", "hang"):
            return None
        status = {"status": "wrong", "reason": "1 is not 2"} if self.name == "bad" else {"status": "pass"}
        return {"op": self.name, "dtype": self.line.split()[1], **status}

    def end(self, patience=0.0):
        return "Segmentation fault"


class Op:
    variant_test_name = ""

    def __init__(self, name):
        self.name = name
        self.dtypes = self.dtypesIfCUDA = {gpu_opinfo.torch.float32, gpu_opinfo.torch.bfloat16}


OPS = [Op(name) for name in ("add", "die", "hang", "mul")]


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_opinfo, "_database", lambda: OPS)
    monkeypatch.setattr(gpu_opinfo.Driver, "_start", lambda self: Played())
    Played.lines = []

    def main(*options):
        out = tmp_path / "out.json"
        monkeypatch.setattr(
            sys, "argv", ["gpu_opinfo", "--device", "cpu", "--workers", "2", "--json", str(out), *options]
        )
        code = gpu_opinfo.main()
        return code, json.loads(out.read_text())

    return main


def test_workers_that_die_or_hang_cost_their_cells(run):
    code, report = run()
    assert code == 0 and report["summary"] == {d: {"pass": 2, "error": 2} for d in ("float32", "bfloat16")}
    reasons = {r["op"]: r["reason"] for r in report["not passed"]}
    assert (
        "Segmentation fault" in reasons["die"] and "no answer" in reasons["hang"] and report["not run"] == 0
    )


def test_a_second_run_goes_on_where_the_first_one_stopped(run, tmp_path):
    code, report = run("--budget", "-1")
    assert code == 0 and report["rows"] == {} and report["not run"] == 8
    _, first = run("--dtypes", "float32", "--ops", "add|mul")
    (tmp_path / "out.json").rename(tmp_path / "first.json")
    Played.lines = []
    _, report = run("--merge", str(tmp_path / "first.json"))
    assert len(report["rows"]) == 8 and len(Played.lines) == 6 and report["pass rate"]["float32"] == 0.5


def test_a_wrong_op_fails_the_run(run, monkeypatch):
    monkeypatch.setattr(OPS[0], "name", "bad")
    code, report = run("--ops", "bad", "--dtypes", "float32")
    assert code == 1 and report["not passed"][0]["reason"] == "1 is not 2"


def test_a_cell_compares_with_eager():
    torch = gpu_opinfo.torch
    sample = types.SimpleNamespace(input=torch.randn(4), args=(), kwargs={})
    op = types.SimpleNamespace(
        name="f", variant_test_name="", op=torch.sin, sample_inputs=lambda *given, **more: [sample]
    )
    with gpu_opinfo.config.patch(target=""):
        assert gpu_opinfo.run_cell(op, "float32", "meta", 1)["status"] == "pass"
    drawn = iter(range(100))
    op.op = lambda x: x + next(drawn)
    assert gpu_opinfo.run_cell(op, "float32", "meta", 1)["status"] == "wrong"


def cell_of(op, name, given):
    """A cell of an op whose second call, the compiled one, is another function."""
    sample = types.SimpleNamespace(input=given, args=(), kwargs={})
    row = types.SimpleNamespace(
        name=name, variant_test_name="", op=op, sample_inputs=lambda *args, **more: [sample]
    )
    with gpu_opinfo.config.patch(target=""):
        return gpu_opinfo.run_cell(row, "bfloat16", "meta", 1)


@pytest.mark.parametrize("off, status", [(0.0, "pass"), (-0.06, "wrong")])
def test_a_result_closer_to_float64_than_eagers_is_right_and_one_farther_off_is_wrong(
    monkeypatch, off, status
):
    torch = gpu_opinfo.torch

    def rough(x):
        return x.double().sum(-1).to(x.dtype) + (0.05 if x.dtype is torch.bfloat16 else 0)

    def ours(x, args, kwargs):
        return x.double().sum(-1).to(x.dtype) + torch.tensor([0, 0, off], dtype=x.dtype)

    monkeypatch.setattr(gpu_opinfo, "compile_", lambda function: ours)
    assert cell_of(rough, "f", torch.full((3, 4), 0.0625, dtype=torch.bfloat16))["status"] == status


@pytest.mark.parametrize(
    "name, status", [("torch.ops.aten._efficient_attention_forward", "pass"), ("other", "wrong")]
)
def test_seeds_behind_attention_are_not_compared(monkeypatch, name, status):
    drawn = iter(range(100))
    monkeypatch.setattr(gpu_opinfo, "compile_", lambda function: function)
    found = cell_of(lambda x: (x, x, gpu_opinfo.torch.tensor(next(drawn))), name, gpu_opinfo.torch.ones(3))
    assert found["status"] == status
