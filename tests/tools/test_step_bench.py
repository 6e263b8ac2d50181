"""`bench --step` trains a model its four ways and prints what it found."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench import step


def test_a_small_model_two_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    args = parser.parse_args(["--step", "--ways", "eager,step"])
    vars(args).update(
        models="resnet18",
        device="cpu",
        amp="none",
        batch=2,
        small=True,
        seconds=0.1,
        timeout=300.0,
        json=str(tmp_path / "out.json"),
    )
    assert step.main(args) == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert set(row["ways"]) == {"eager", "step"} and not row["notes"]
    assert all(
        way["ms"] > 0 and way["loss"] == pytest.approx(row["ways"]["eager"]["loss"], abs=1e-2)
        for way in row["ways"].values()
    )
    assert "resnet18" in capsys.readouterr().out
