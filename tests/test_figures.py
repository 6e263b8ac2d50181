"""Figures of the README and of the results page are those of the committed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs/results/README.md"


def read(name: str) -> Any:
    return json.loads((ROOT / "docs/results" / f"{name}.json").read_text())


def spread(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def test_the_readmes_table_of_cpus() -> None:
    found = {(r["model"], r["phase"], r["compiler"]): r for r in read("cpu-bert-resnet18")["rows"]}
    names = {"BertForMaskedLM": "BERT-base", "resnet18": "resnet18"}
    for model, phase in sorted({key[:2] for key in found}):
        peer, ours = (found[model, phase, c] for c in ("inductor", "dynamotor"))
        times = [spread(*(r["timing"][k] for k in ("speedup", "low", "high"))) for r in (peer, ours)]
        cells = (
            f"| {peer['first_call_s']:.1f} | {ours['first_call_s']:.2f} "
            f"| {peer['warm_s']:.1f} | {ours['warm_s']:.2f} | {times[0]} | {times[1]} |"
        )
        rows = [
            line for line in README.read_text().splitlines() if line.startswith(f"| {names[model]}, {phase}")
        ]
        assert len(rows) == 1 and rows[0].endswith(cells), cells


def test_the_sentences_about_gpus() -> None:
    train, infer = (read("h200-gpu")["summary"][phase] for phase in ("train", "infer"))
    steps = read("h100-step")["step_is_faster_by"]
    readme, page = README.read_text(), PAGE.read_text()
    assert f"{train['speedup']:.2f} times eager" in readme and f"runs {train['peer_speedup']:.2f})" in readme
    assert f"{steps['torch.compile']:.1f} times as fast as `torch.compile`" in readme
    assert f"training {train['ratio']:.2f} times `torch.compile` ({train['speedup']:.2f} times eager" in page
    assert f"inference {infer['ratio']:.2f} times `reduce-overhead`" in page


@pytest.mark.parametrize("n, model", enumerate(
    ["resnet50", "BERT-base", "ViT-B/16", "GPT-2", "convnext_base", "swin_base", "T5", "Llama, 8 layers"]
))  # fmt: skip
def test_the_table_of_gpus(n: int, model: str) -> None:
    rows = [r for r in read("h200-gpu")["rows"].values() if isinstance(r, dict)]
    name = {"BERT-base": "BertFor", "ViT-B/16": "vit_base", "GPT-2": "GPT2", "Llama, 8 layers": "Llama"}.get(
        model, model
    )
    cells = []
    for mode in ("train", "infer"):
        (row,) = (r for r in rows if r.get("mode") == mode and r["model"].startswith(name))
        cells += [spread(row[k], *row[f"{k}_spread"]) for k in ("speedup", "ratio")]
        cells += [f"{row['cold_s'][k]:.1f}" for k in ("ours", "peer")]
    assert f"| {model} | {' | '.join(cells)} |" in PAGE.read_text()


def test_the_table_of_xla() -> None:
    for row in read("cpu-xla")["rows"]:
        ways = row["ways"]
        cells = [f"{ways['lazy']['ms']:.2f}"]
        for way in ("trace_everytime", "trace_once", "compile_step", "jit"):
            numbers = ways.get(way)
            cells.append(spread(*(numbers[k] for k in ("over_lazy", "low", "high"))) if numbers else "-")
        assert f"| {row['model']}, {row['phase']} | {' | '.join(cells)} |" in PAGE.read_text()


def test_the_sentences_about_xla_on_a_gpu() -> None:
    infer = read("h200-xla-infer")["summary"]["infer"]
    train = read("h200-xla-train")["summary"]["train"]
    text = PAGE.read_text()
    assert f"trace_once is {infer['trace_once']:.2f} times as fast as the lazy device" in text
    assert f"{train['trace_once']:.2f} times in training" in text
    assert f"(`compile_step`) is {train['compile_step']:.2f} times as fast" in text
