"""`python -m dynamotor ranks out.rank*.jsonl`: the event streams of a program's ranks side by side.

One row a rank: graphs, breaks, recompilations, fallbacks, seconds of capture and compilation. Then the events
that some ranks have more often than others: ranks that compile another number of times wait for each other.
`-o all.json` writes one file for https://ui.perfetto.dev with a process for each rank; times count from each
process's start.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from .stream import chrome_row
from .tables import render

Row = dict[str, Any]
# The events that ranks of one program should share, and the fields that tell them apart.
_COMPARED = {
    "capture": ("name",),
    "break": ("reason",),
    "recompile": ("name", "reasons"),
    "fallback": ("reason",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the ranks command."""
    parser.add_argument("streams", nargs="+", type=Path, help="files that DYNAMOTOR_TRACE=out.jsonl wrote")
    parser.add_argument("-o", "--output", type=Path, help="a file for Perfetto, of all ranks")


def main(args: argparse.Namespace) -> int:
    """Run the command; 1 when ranks differ, 2 for a file that is no stream."""
    try:
        ranks = {_rank(path, n): _rows(path) for n, path in enumerate(args.streams)}
    except (OSError, ValueError) as error:
        print(f"not a stream of events: {error}", file=sys.stderr)
        return 2
    print(render([_summary(rank, rows) for rank, rows in sorted(ranks.items())], _HEADER))
    different = differences(ranks)
    print("\nall ranks have the same events" if not different else "\nevents that ranks do not share:")
    for kind, text, counts in different:
        print(f"  {kind} {text}: " + ", ".join(f"rank {rank} {n} times" for rank, n in counts.items()))
    if args.output is not None:
        args.output.write_text(json.dumps(merged(ranks)))
    return 1 if different else 0


_HEADER = "rank", "graphs", "breaks", "recompilations", "fallbacks", "compile s"


def _rank(path: Path, place: int) -> int:
    """The rank in a file's name; else its place among the files."""
    found = re.search(r"rank(\d+)", path.name)
    return int(found[1]) if found else place


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _summary(rank: int, rows: list[Row]) -> list[str]:
    kinds = Counter(row["kind"] for row in rows)
    phases = [row for row in rows if row["kind"] == "phase" and row["name"] in ("capture", "backend")]
    counts = [kinds[kind] for kind in _COMPARED]
    return [str(rank), *map(str, counts), f"{sum(row['seconds'] for row in phases):.2f}"]


def differences(ranks: dict[int, list[Row]]) -> list[tuple[str, str, dict[int, int]]]:
    """(kind, text, how often by rank) of the events that ranks do not have equally often."""
    counts: dict[tuple[str, str], Counter[int]] = {}
    for rank, rows in ranks.items():
        for row in rows:
            if row["kind"] in _COMPARED:
                words = [row.get(name, "") for name in _COMPARED[row["kind"]]]
                text = " ".join(str(word).partition("\n")[0] for word in words)
                counts.setdefault((row["kind"], text), Counter())[rank] += 1
    return [
        (kind, text, {rank: found[rank] for rank in sorted(ranks)})
        for (kind, text), found in counts.items()
        if len({found[rank] for rank in ranks}) > 1
    ]


def merged(ranks: dict[int, list[Row]]) -> list[Row]:
    """The spans and instants of all ranks in the Chrome format, a process for each rank."""
    found: list[Row] = []
    for rank, rows in sorted(ranks.items()):
        found.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        found += [{**span, "pid": rank} for row in rows if (span := chrome_row(dict(row))) is not None]
    return found
