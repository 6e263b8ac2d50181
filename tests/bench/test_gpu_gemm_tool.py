"""The tool that fills the table of matrix products: rows from timings, winners into the table."""

import json
import sys

import pytest

pytest.importorskip("transformers", reason="the models need transformers")

from bench import gpu_gemm
from dynamotor.base.events import Event
from dynamotor.codegen import gemm_table

TILING = {"m": 128, "n": 64, "k": 64, "warps": 4, "stages": 3, "group": 8, "persistent": False, "tma": True}


def timed(label, wins):
    data = {
        "gpu": "NVIDIA H200",
        "label": label,
        "tiling": TILING,
        "wins": wins,
        "library_ms": 1.0,
        "template_ms": 0.5 if wins else 2.0,
    }
    return Event("autotune", {**data, "all_ms": [1.0]})


def test_winners_are_written_with_their_tilings_and_losers_without(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"about": "a table", "rows": {"NVIDIA H200 b": {"m": 1}, "other": {"m": 2}}}))
    rows = gpu_gemm.rows_of([timed("a", True), timed("b", False)])
    assert gpu_gemm.write_table(rows, path) == 1
    short = {"m": 128, "n": 64, "k": 64, "tma": True}  # what differs from the defaults
    assert json.loads(path.read_text()) == {
        "about": "a table",
        "rows": {"NVIDIA H200 a": short, "NVIDIA H200 b": None, "other": {"m": 2}},
    }
    assert len(path.read_text().splitlines()) == 8  # a line a row


def test_the_stored_table_is_as_the_tool_writes_it(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(gemm_table.PATH.read_text())
    assert gpu_gemm.write_table({}, path) == 0 and path.read_text() == gemm_table.PATH.read_text()


@pytest.mark.slow
def test_a_run_measures_each_model_and_says_what_it_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "gpu_gemm",
            "--device",
            "cpu",
            "--tiny",
            "--models",
            "BertForMaskedLM",
            "--modes",
            "infer",
            "--json",
            str(tmp_path / "rows.json"),
        ],
    )
    assert gpu_gemm.main() == 0 and json.loads((tmp_path / "rows.json").read_text()) == {}
    monkeypatch.setattr(gpu_gemm, "measure", lambda *given: gpu_gemm.rows_of([timed("a", True)]))
    assert (
        gpu_gemm.main() == 0 and "0.500 of the library's 1.0000 ms: NVIDIA H200 a" in capsys.readouterr().out
    )
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--budget", "-1"])
    gpu_gemm.main()
    assert "not run for want of time: infer/BertForMaskedLM" in capsys.readouterr().out
