"""Linear layers whose weights are bytes stand for those that they were made of."""

import json

import pytest
import torch
from torch import nn

from bench import few_rows
from bench.decode_weights import quantise
from dynamotor.base.config import config

OPTIONS = ["--device", "cpu", "--small", "--shapes", "512x1032", "--rows", "2", "--weights", "int8"]
OPTIONS += ["--times", "1", "--cuts", "outputs=32"]


@pytest.mark.parametrize(("weights", "error"), [("int8", 0.02), ("int4", 0.2)])
@pytest.mark.parametrize("bias", [False, True])
def test_quantised_layers_are_near_the_dense_ones(weights, error, bias):
    model = nn.Sequential(nn.Linear(64, 96, bias=bias), nn.Sequential(nn.Linear(96, 32, bias=bias)))
    x = torch.randn(4, 64)
    with torch.no_grad():
        want = model(x)
        quantise(model, weights)
        got = model(x)
    assert not any(isinstance(m, nn.Linear) for m in model.modules())
    assert (got - want).norm() <= error * want.norm()


def test_the_bench_of_few_rows_measures_and_checks_on_a_cpu(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("sys.argv", ["few_rows", *OPTIONS, "--json", str(tmp_path / "few.json")])
    with config.patch():
        assert few_rows.main() == 0
    (ours, library, cut) = json.loads((tmp_path / "few.json").read_text())["rows"]
    assert [r["way"] for r in (ours, library, cut)] == ["ours", "library", "ours"]
    assert cut["cut"] == "outputs=32" and max(r["error"] for r in (ours, library, cut)) < 2e-2
    assert "GB/s" in capsys.readouterr().out
