"""A picture of when gradient buckets are ready and when they are reduced, as SVG text without any library.

>>> Path("ddp.svg").write_text(timeline([("resnet18, 200", {"eager": [{"ready": 0.1, "done": 0.3, "backward": 0.2}]})]))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

LEFT, WIDTH, ROW, GAP = 250, 820, 14, 26
_COMPUTE, _WAIT = "#c9d4e3", "#d9822b"

Stamps = Sequence[Mapping[str, float]]


def timeline(cells: Sequence[tuple[str, Mapping[str, Stamps]]]) -> str:
    """One panel a cell, one group of rows a mode: the backward in grey, each bucket from ready to done in
    orange.

    Times are seconds from the start of the backward; the modes of a panel share its scale.
    """
    parts: list[str] = []
    y = 34
    for title, modes in cells:
        scale = WIDTH / max(
            (max(s.get("done", 0.0), s["backward"]) for rows in modes.values() for s in rows), default=1.0
        )
        parts.append(_text(10, y, title, bold=True))
        y += 8
        for mode, rows in modes.items():
            parts.append(_text(20, y + ROW, mode))
            if rows:
                y = _mode(parts, y, rows, scale)
            y += ROW
        parts.append(_text(LEFT, y + 4, f"0 .. {WIDTH / scale * 1e3:.0f} ms from the start of the backward"))
        y += GAP + 8
    return _page(parts, y, "grey: the backward; orange: a bucket from ready to reduced; the tick: ready")


def lanes(cells: Sequence[tuple[str, Mapping[str, Mapping[str, Any]]]]) -> str:
    """One panel a model, two lanes a mode: when kernels ran (grey) and when collectives did (orange), one
    training step.

    A mode is what `ddp_overlap.evidence` gives; the modes of a panel share its scale.
    """
    parts: list[str] = []
    y = 34
    for title, modes in cells:
        scale = WIDTH / (max((about["step_ms"] for about in modes.values()), default=0.0) or 1.0)
        parts.append(_text(10, y, title, bold=True))
        y += 8
        for mode, about in modes.items():
            share = (
                ""
                if about["share"] is None
                else f", {about['share']:.0%} of {about['collectives_ms']:.2f} ms covered"
            )
            parts.append(_text(20, y + ROW, mode + share))
            for lane, colour in (("kernels", _COMPUTE), ("collectives", _WAIT)):
                spans = [(LEFT + a * scale, LEFT + b * scale) for a, b in about["lanes"][lane]]
                parts.append(_bars(spans, y + 4, ROW - 4, colour))
                y += ROW - 2
            y += 6
        parts.append(_text(LEFT, y + 6, f"0 .. {WIDTH / scale:.1f} ms from the start of the step"))
        y += GAP + 8
    return _page(parts, y, "grey: kernels; orange: collectives")


def _page(parts: Sequence[str], height: int, legend: str) -> str:
    size = f'width="{LEFT + WIDTH + 20}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    ground = f'<rect width="100%" height="{height}" fill="white"/>'
    return "\n".join([head, ground, _text(LEFT, 14, legend), *parts, "</svg>"]) + "\n"


def _mode(parts: list[str], y: int, rows: Stamps, scale: float) -> int:
    parts.append(_bar(LEFT, y + 4, rows[0]["backward"] * scale, ROW * len(rows), _COMPUTE))
    for i, row in enumerate(rows):
        ready = row.get("ready", 0.0)
        at = LEFT + ready * scale
        parts.append(_bar(at, y + 6 + i * ROW, (row.get("done", ready) - ready) * scale, ROW - 4, _WAIT))
        parts.append(_bar(at - 1, y + 4 + i * ROW, 2, ROW, "#333"))
    return y + ROW * (len(rows) - 1) + 6


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def _bars(spans: Sequence[tuple[float, float]], y: float, height: float, colour: str) -> str:
    """All bars of a lane as one path. Bars less than half a pixel apart, which no screen shows apart, are
    drawn as one.
    """
    drawn: list[list[float]] = []
    for start, end in spans:
        end = max(end, start + 0.5)
        if drawn and start - drawn[-1][1] < 0.5:
            drawn[-1][1] = max(drawn[-1][1], end)
        else:
            drawn.append([start, end])
    outline = "".join(
        f"M{start:.1f} {y:.1f}h{end - start:.1f}v{height:.1f}h-{end - start:.1f}z" for start, end in drawn
    )
    return f'<path d="{outline}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{weight}>{escape(text)}</text>'
