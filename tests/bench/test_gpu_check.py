"""The checks that a GPU machine runs, tried on a CPU: they are themselves programs with mistakes to make."""

import json
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the models need transformers")

from bench import gpu_check, gpu_graph_checks, gpu_size_checks, gpu_template_checks
from bench.triton_interpret import available
from dynamotor.codegen.triton_gemm import Tiling


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "label", [label for label in gpu_graph_checks.CHECKS if "BERT" not in label and "follows" not in label]
)
def test_checks_of_graphs(label):
    row = gpu_graph_checks.CHECKS[label]("cpu")
    assert row["ok"] and row["counts"] == {}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name, work", gpu_size_checks.rows("cpu"))
@pytest.mark.slow
def test_checks_of_sizes(name, work):
    assert work()["ok"], name


def test_sections_are_written_and_a_row_that_raises_is_an_error(tmp_path, monkeypatch):
    wanted = {"map", "total"}
    real = gpu_check.cases
    monkeypatch.setattr(
        gpu_check,
        "cases",
        lambda device: (
            {k: v for k, v in real(device).items() if k in wanted}
            | {"broken": (lambda x: x.no_such_method(), [torch.ones(2)])}
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
    assert (
        all(report["kernels"][name]["ok"] for name in wanted)
        and "no_such_method" in report["kernels"]["broken"]["error"]
    )
    assert report["dropout"]["dropout"]["ok"] and report["models"] == {}


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 0 and "no GPU in this machine" in capsys.readouterr().out


@pytest.mark.sweep(6)
@pytest.mark.skipif(not available(), reason="triton is not there, or was imported without TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", list(gpu_template_checks.cases("cpu")))
def test_checks_of_templates(name):
    row = gpu_template_checks.check(
        name, *gpu_template_checks.cases("cpu")[name], tiling=Tiling(128, 128, 64)
    )
    assert row["ok"] and len(row["labels"]) == 1, row
    assert len(list(gpu_template_checks.rows("cpu"))) > 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU in this machine")
@pytest.mark.parametrize("label", list(gpu_graph_checks.CHECKS))
def test_checks_of_graphs_on_a_gpu(label):
    row = gpu_graph_checks.CHECKS[label]("cuda")
    assert row["ok"], row


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU in this machine")
def test_checks_of_templates_on_a_gpu():
    for name, work in gpu_template_checks.rows("cuda"):
        row = work()
        assert row["ok"], (name, row)
