"""The checks that a GPU machine runs, tried on a CPU: they are themselves programs with mistakes to make."""

import json
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the models need transformers")

from dynamotor.tools import gpu_check, gpu_graph_checks


@pytest.mark.parametrize("label", [label for label in gpu_graph_checks.CHECKS if "BERT" not in label and "follows" not in label])
def test_checks_of_graphs(label):
    row = gpu_graph_checks.CHECKS[label]("cpu")
    assert row["ok"] and row["counts"] == {}


def test_sections_are_written_and_a_row_that_raises_is_an_error(tmp_path, monkeypatch):
    wanted = {"map", "total"}
    real = gpu_check.cases
    monkeypatch.setattr(
        gpu_check,
        "cases",
        lambda device: (
            {k: v for k, v in real(device).items() if k in wanted} | {"broken": (lambda x: x.no_such_method(), [torch.ones(2)])}
        ),
    )
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "gpu_check",
            "--device",
            "cpu",
            "--sections",
            "kernels,dropout,models",
            "--models",
            "resnet18",
            "--budget",
            "-1",
            "--json",
            str(out),
        ],
    )
    assert gpu_check.main() == 1
    report = json.loads(out.read_text())
    assert all(report["kernels"][name]["ok"] for name in wanted) and "no_such_method" in report["kernels"]["broken"]["error"]
    assert report["dropout"]["dropout"]["ok"] and report["models"] == {}


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 0 and "no GPU in this machine" in capsys.readouterr().out
