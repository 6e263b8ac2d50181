"""`bench --step` trains a model its four ways and prints the results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench import step, step_check
from bench.gpu_programs import kind_of


@pytest.mark.slow
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


def test_a_check_sees_a_missed_step_and_lets_roundings_pass() -> None:
    losses = [9.0, 8.5, 8.0, 7.5]
    seeds = {"mean": 7.6, "deviation": 0.02}
    right = {
        "losses": {
            "float32": losses,
            "eager": [x + 1e-3 for x in losses],
            "step": [x - 2e-3 for x in losses],
        },
        "weights": {"eager": {"all": 0.02, "worst": 0.3}, "step": {"all": 0.025, "worst": 0.35}},
        "seeds": {"eager": seeds, "step": {"mean": 7.61, "deviation": 0.02}},
    }
    assert not step_check.wrong(right)
    late = {**right, "losses": {**right["losses"], "step": [9.0, 9.0, 8.5, 8.0]}}
    far = {**right, "weights": {**right["weights"], "step": {"all": float("nan"), "worst": 0.9}}}
    noisy = {**right, "seeds": {"eager": seeds, "step": {"mean": 7.85, "deviation": 0.02}}}
    assert [len(step_check.wrong(row)) for row in (late, far, noisy)] == [1, 2, 1]


def test_kernels_are_told_apart_by_what_they_fuse() -> None:
    facts = {
        name: {"note": note} for name, note in {"dm_a_1": "copy__default_3", "dm_copy_2": "clone"}.items()
    }
    kinds = [
        kind_of(name, facts) for name in ("dm_a_1", "dm_copy_2", "nvjet_hsh_64", "multi_tensor_apply_kernel")
    ]
    assert kinds == ["ours: update", "ours: copies", "matmul", "optimizer"]
