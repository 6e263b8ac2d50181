"""Charts of the results: `python docs/site/charts.py` writes docs/pictures/*.svg from the files of docs/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PICTURES = ROOT / "docs" / "results", ROOT / "docs" / "pictures"
WIDTH, LABEL, BAR, GAP = 720, 210, 11, 9
COLORS = {"dynamotor": "#4051b5", "torch.compile": "#e8833a"}
STYLE = (
    "text{font:12px sans-serif;fill:#222}.axis{stroke:#888}.number{font-size:11px}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.axis{stroke:#999}}"
)


Rows: TypeAlias = list[tuple[str, *tuple[float, ...]]]  # label, then a number a bar


class Chart(NamedTuple):
    """A bar a row, or two: ours and the peer's. `mark` is a value to which bars are compared."""

    title: str
    rows: Rows
    unit: str
    mark: float | None = None


def svg(chart: Chart) -> str:
    """The picture; it follows the reader's light or dark scheme."""
    largest, bars = max(max(row[1:]) for row in chart.rows), len(chart.rows[0]) - 1
    scale = (WIDTH - LABEL - 70) / largest
    step = bars * BAR + GAP
    height = 62 + step * len(chart.rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{chart.title}</title><style>{STYLE}</style>",
        f'<text x="4" y="16" font-weight="bold">{chart.title}</text>',
    ]
    for n, (name, color) in enumerate([*COLORS.items()][:bars]):
        x = LABEL + 130 * n
        parts.append(f'<rect x="{x}" y="28" width="11" height="11" fill="{color}"/>')
        parts.append(f'<text x="{x + 16}" y="38">{name}</text>')
    for n, (label, *values) in enumerate(chart.rows):
        y = 52 + n * step
        parts.append(f'<text x="{LABEL - 6}" y="{y + bars * BAR // 2 + 4}" text-anchor="end">{label}</text>')
        for m, (value, color) in enumerate(zip(values, COLORS.values(), strict=False)):
            width = value * scale
            top = y + m * BAR
            parts.append(
                f'<rect x="{LABEL}" y="{top}" width="{width:.1f}" height="{BAR - 1}" fill="{color}"/>'
            )
            parts.append(
                f'<text class="number" x="{LABEL + width + 4:.1f}" y="{top + 9}">{value:.2f}{chart.unit}</text>'
            )
    if chart.mark is not None:
        x = LABEL + chart.mark * scale
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="48" y2="{height - 6}"/>')
    return "\n".join([*parts, "</svg>", ""])


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _cpu(phase: str) -> Rows:
    rows = [r for r in _read("cpu-twelve")["rows"] if (r["phase"], r["compiler"]) == (phase, "dynamotor")]
    return [(r["model"], r["timing"]["speedup"]) for r in rows]


def _gpu(phase: str) -> Rows:
    rows = [r for r in _read("h200-gpu")["rows"].values() if r["mode"] == phase and "ms" in r]
    return [(r["model"], r["speedup"], r["peer_speedup"]) for r in rows]


def _first_calls(kind: str) -> Rows:
    rows = {(r["model"], r["phase"], r["compiler"]): r for r in _read("cpu-bert-resnet18")["rows"]}
    found: Rows = []
    for model, phase, compiler in rows:
        if compiler == "dynamotor":
            pair = [rows[model, phase, name][kind] for name in ("dynamotor", "inductor")]
            found.append((f"{model}, {phase}", *pair))
    return found


def charts() -> dict[str, Chart]:
    """The charts by the names of their files."""
    found = {}
    for phase, text in {"infer": "inference", "train": "training step"}.items():
        found[f"cpu-{phase}"] = Chart(f"CPU, {text}: times as fast as eager", _cpu(phase), "x", 1.0)
        found[f"h200-{phase}"] = Chart(f"H200, {text}: times as fast as eager", _gpu(phase), "x", 1.0)
    for kind, text in {"first_call_s": "empty caches", "warm_s": "second process"}.items():
        found[f"cpu-{kind.removesuffix('_s').replace('_', '-')}"] = Chart(
            f"CPU, first call, {text}", _first_calls(kind), " s"
        )
    return found


def pictures() -> dict[str, str]:
    """The files of docs/pictures by name."""
    return {f"{name}.svg": svg(chart) for name, chart in charts().items()}


if __name__ == "__main__":
    for name, text in pictures().items():
        (PICTURES / name).write_text(text)
        print(PICTURES / name)
