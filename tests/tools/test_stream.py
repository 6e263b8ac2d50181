"""The event stream as JSON lines and for Perfetto, progress on a terminal, names in a profile; nothing when
nobody asks.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from children import run_forked

import dynamotor
from dynamotor import config
from dynamotor.base import events
from dynamotor.base.events import Event
from dynamotor.tools import stream
from dynamotor.tools.stream import Progress, Stream

CODE = """
import torch, dynamotor
def f(x, n):
    y = x.sin() * n
    print(end="")
    return y.cos()
fast = dynamotor.compile(f)
fast(torch.randn(3), 2.0), fast(torch.randn(3), 3.0)
"""


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_event_of_a_program_is_a_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert run_forked(CODE, DYNAMOTOR_TRACE=str(path)).returncode == 0
    rows = _rows(path)
    assert {"begin", "phase", "capture", "break", "recompile", "aten_graph", "code", "build"} <= {
        row["kind"] for row in rows
    }
    assert all({"time", "pid", "thread"} <= row.keys() for row in rows)
    assert "argument `n` is 3.0, was 2.0" in str(
        next(row for row in rows if row["kind"] == "recompile")["reasons"]
    )
    assert "[DM211]" in next(row for row in rows if row["kind"] == "break")["reason"]
    assert max(len(json.dumps(row)) for row in rows) < 3000


def test_perfettos_format_has_spans_and_instants(tmp_path: Path) -> None:
    writes = Stream(str(tmp_path / "out.json"))
    remove = events.subscribe(writes, *stream.KINDS)
    dynamotor.compile(lambda x: x.sin() + 1)(torch.randn(3))
    remove()
    writes.file.close()
    rows = json.loads((tmp_path / "out.json").read_text().rstrip(",\n") + "]")
    spans = {row["name"]: row for row in rows if row["ph"] == "X"}
    assert {"capture", "backend", "lower"} <= spans.keys() and all(row["dur"] >= 0 for row in spans.values())
    inner, outer = spans["lower"], spans["backend"]
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1
    assert any(row["ph"] == "i" and row["name"] == "capture" for row in rows)


def test_nothing_listens_when_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_listeners", [])
    stream.install(io.StringIO())
    assert not events._listeners
    with config.patch(trace=os.devnull):
        stream.install(io.StringIO())
    assert len(events._listeners) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_speaks_after_two_seconds_and_clears_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_listeners", [])
    stream.install(terminal := Terminal())
    ((progress, kinds),) = events._listeners
    assert isinstance(progress, Progress) and kinds == ("begin", "phase")
    progress(Event("begin", {"name": "capture"}, 10.0))
    progress(Event("phase", {"name": "capture"}, 11.9))
    assert terminal.getvalue() == ""
    progress(Event("begin", {"name": "backend"}, 12.0))
    progress(Event("begin", {"name": "lower"}, 13.0))
    assert "compiling for 3 s: lower" in terminal.getvalue()
    progress(Event("phase", {"name": "lower"}, 14.0))
    progress(Event("phase", {"name": "backend"}, 14.5))
    assert terminal.getvalue().endswith("\r\x1b[2K")
    before = terminal.getvalue()
    progress(Event("begin", {"name": "capture"}, 90.0))
    assert terminal.getvalue() == before


def test_ranks_write_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert stream._own("a/out.html") == "a/out.rank1.html"


def test_kernels_have_names_in_torchs_profiler() -> None:
    fast, x = dynamotor.compile(lambda x: torch.nn.functional.gelu(x).softmax(-1)), torch.randn(8, 64)
    fast(x)
    with torch.profiler.profile() as profile:
        fast(x)
    names = [row.key for row in profile.key_averages() if row.key.startswith("dynamotor::")]
    assert len(names) == 1 and "erf" in names[0]
