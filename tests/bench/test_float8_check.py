"""`python -m bench float8_check` finds casts that are eager's, and curves that follow bfloat16's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import float8_check

ON_CPU = ["--device", "cpu", "--small"]


def test_casts_have_eagers_bits(tmp_path: Path) -> None:
    out = tmp_path / "float8.json"
    assert float8_check.main([*ON_CPU, "--parts", "bits", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["bits"]
    assert len(rows) == 6 and all(row["numbers"] > 8000 and not row["wrong"] for row in rows)


def test_a_wrong_bit_is_found() -> None:
    x = torch.tensor([1.0, -0.0, torch.nan, 2.0])
    assert not len(float8_check._differing(x, x.clone()))
    other = torch.tensor([1.0, 0.0, torch.nan, torch.nan])
    assert float8_check._differing(x, other).tolist() == [1, 3]
    assert "2 [1: -0.0 0.0" in float8_check._told([float8_check._differing(x, other)], [x], [other])


@pytest.mark.slow
def test_a_model_in_float8_follows_its_losses_in_bfloat16(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    out = tmp_path / "float8.json"
    assert float8_check.main([*ON_CPU, "--parts", "losses", "--steps", "6", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["losses"]
    assert [row["way"] for row in rows[3:6]] == ["eager", "dynamotor", "compile_step"]
