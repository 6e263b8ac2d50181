"""`python -m bench llm` runs its rows at tiny sizes and writes the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench import llm, llm_rows, torchvision_stub

pytest.importorskip("transformers")
FEW = ["--device", "cpu", "--small", "--sizes", "1x32", "--steps", "2", "--warm", "1"]


@pytest.mark.slow
def test_a_small_row_of_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "llm.json"
    rows = ["--rows", "llama-1.2b,attention", "--ways", "eager,dynamotor,compile_step"]
    assert llm.main([*FEW, "--json", str(out), *rows]) == 0
    found = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in found] == ["eager", "dynamotor", "compile_step", "eager", "dynamotor"]
    first = found[0]["loss"]
    assert all(row["loss"] == pytest.approx(first, abs=2e-2) for row in found[:3])
    assert "share of peak" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_model_in_float8_by_each_recipe(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    out = tmp_path / "llm.json"
    assert (
        llm.main([*FEW, "--json", str(out), "--rows", "llama-1.2b", "--float8", recipe, "--ways", "eager"])
        == 0
    )
    assert [row["float8"] for row in json.loads(out.read_text())["rows"]] == [recipe]


def test_float8_says_that_torchao_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(SystemExit):
        llm.main(["--float8", "tensorwise"])
    assert "pip install --no-deps torchao" in capsys.readouterr().err


@pytest.mark.parametrize("name", llm_rows.ATTENTION)
def test_each_attention_row_is_what_its_rule_says(name: str) -> None:
    attend, (q, k, v, ids) = llm_rows.masked_attention(name, 2, 16, "cpu", small=True)
    places = torch.arange(16)
    seen = llm_rows.ATTENTION[name](places[None, None, :, None], places[None, None, None, :], ids)
    scores = q @ k.repeat_interleave(2, 1).transpose(-2, -1) / 4.0
    want = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(attend(q, k, v, ids), want)


@pytest.mark.slow
def test_every_model_is_one_of_transformers() -> None:
    torchvision_stub.prepare()
    import transformers

    assert all(hasattr(transformers, name) for row in llm_rows.MODELS.values() for name in row[:2])
