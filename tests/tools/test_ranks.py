"""Streams of several ranks: a row for each, the events that they do not share, one file for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamotor.__main__ import main


def _stream(path: Path, *rows: dict[str, Any]) -> str:
    facts = {"time": 1.5, "pid": 7, "thread": 9}
    path.write_text("".join(json.dumps(facts | row) + "\n" for row in rows))
    return str(path)


CAPTURE = {"kind": "capture", "name": "f"}
PHASES = [{"kind": "begin", "name": "capture"}, {"kind": "phase", "name": "capture", "seconds": 0.5}]
RECOMPILE = {"kind": "recompile", "name": "f", "reasons": ["argument `n` is 3.0, was 2.0"]}


def test_ranks_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        _stream(tmp_path / "out.rank1.jsonl", CAPTURE, *PHASES, RECOMPILE, CAPTURE),
        _stream(tmp_path / "out.rank0.jsonl", CAPTURE, *PHASES),
    ]
    assert main(["ranks", *paths]) == 1
    rank0, rank1 = capsys.readouterr().out.splitlines()[1:3]
    assert rank0.split() == ["0", "1", "0", "0", "0", "0.50"] and rank1.split()[:4] == ["1", "2", "0", "1"]
    assert main(["ranks", *paths]) == 1
    text = capsys.readouterr().out
    assert "recompile f ['argument `n` is 3.0, was 2.0']: rank 0 0 times, rank 1 1 times" in text


def test_all_ranks_are_processes_of_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [_stream(tmp_path / f"out.rank{n}.jsonl", *PHASES, CAPTURE) for n in (0, 1)]
    assert main(["ranks", *paths, "-o", str(tmp_path / "all.json")]) == 0
    assert "all ranks have the same events" in capsys.readouterr().out
    rows = json.loads((tmp_path / "all.json").read_text())
    assert [(row["pid"], row["ph"]) for row in rows] == [(n, ph) for n in (0, 1) for ph in "MXi"]
    assert rows[1]["ts"] == 1e6 and rows[1]["dur"] == 0.5e6


def test_a_file_that_is_no_stream_ends_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ranks", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
