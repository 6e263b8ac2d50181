"""Runs the test suite on each pair of a Python and a PyTorch, one environment at a time, and writes the counts.

    python tools/test_versions.py                            every row of PAIRS whose Python is on PATH
    python tools/test_versions.py 3.11:2.14.1 --keep         one pair; its environment stays in build/versions
    python tools/test_versions.py 3.14:2.14.1 --python PATH  one pair in an environment that is there already
    python tools/test_versions.py 3.14:2.14.1 --rooms lower  some rooms of tests/ again; the sum is written anew

Each room of tests/ is a run of its own. Its counts are kept in build/versions/PAIR.json, so a run that was
interrupted continues where it stopped; a pair's row in docs/versions.md is the sum, once every room has run.
An environment of a CUDA build takes about 6 GB; it is removed before the next one is made.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
# Each PyTorch with at least two Pythons, and each Python with the newest PyTorch.
PAIRS = ("3.11:2.11.0", "3.12:2.11.0", "3.11:2.13.0", "3.13:2.13.0", "3.14:2.13.0",
         "3.11:2.14.1", "3.12:2.14.1", "3.13:2.14.1", "3.14:2.14.1")  # fmt: skip
VISION = {
    "2.11": "0.26.0",
    "2.12": "0.27.0",
    "2.13": "0.28.0",
    "2.14": "0.29.1",
}  # the torchvision of a PyTorch
# As the Makefile does it: two finders of editable packages, whose namespace is one, hide `dynamotor/__init__.py`.
_EDITABLE = ["--no-build-isolation", "--no-deps", "--config-settings", "editable_mode=compat"]
COUNTS = ("passed", "failed", "skipped", "errors")


def environment(python: str, torch: str) -> Path:
    """A new virtual environment with everything that the tests need, and the package installed in it."""
    folder = ROOT / "build" / "versions" / f"py{python}-torch{torch}"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
    vision = VISION[torch.rpartition(".")[0]]
    for packages in (
        [f"torch=={torch}"],
        ["-r", "requirements-dev.txt"],
        ["--no-deps", f"torchvision=={vision}", "timm==1.0.31"],
        [*_EDITABLE, "-e", "."],
        [*_EDITABLE, "-e", "./xla"],
    ):
        pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, "--no-compile", *packages], check=True, cwd=ROOT)
    return folder


def rooms() -> list[str]:
    """The folders of tests, "." for the files beside them, and "xla" for those of dynamotor-xla. Other people's
    libraries have an environment of their own.
    """
    found = (path.parent for path in (ROOT / "tests").glob("*/test_*.py"))
    return [".", *sorted({path.name for path in found} - {"libraries"} | {"xla"})]


def paths_of(room: str) -> list[str]:
    """What pytest is given for a room."""
    if room == ".":
        return sorted(map(str, (ROOT / "tests").glob("test_*.py")))
    return ["xla/tests" if room == "xla" else f"tests/{room}"]


def run_room(python: Path, room: str, log: Path, jobs: int, limit: float) -> dict[str, Any]:
    """The counts of a room by outcome, and the names of the tests that did not pass."""
    command = [str(python), "-m", "pytest", *paths_of(room), "-n", str(jobs), "--dist", "worksteal", "-rfE"]
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with log.open("w") as output:
        run = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | single, stdout=output, stderr=output, start_new_session=True
        )
        try:
            run.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return {"errors": 1, "not passed": [f"{room} after {limit:.0f} s"]}
    text = log.read_text()
    found = re.findall(r"(\d+) (passed|failed|skipped|error)s?\b", text.splitlines()[-1])
    counts: dict[str, Any] = {word if word != "error" else "errors": int(n) for n, word in found}
    if not counts:
        counts["errors"] = 1
    return counts | {"not passed": re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)}


def run_pair(pair: str, python: Path, again: list[str], jobs: int, limit: float) -> dict[str, dict[str, Any]]:
    """The counts of each room: of `again`, or of the rooms without any, from a run now; of others as they were kept."""
    kept = ROOT / "build" / "versions" / f"{pair.replace(':', '-')}.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for room in again or [room for room in rooms() if room not in results]:
        log = kept.with_suffix(f".{room.strip('.') or 'files'}.log")
        results[room] = run_room(python, room, log, jobs, limit)
        print(f"{pair} {room}: {results[room]}", flush=True)
        kept.write_text(json.dumps(results, indent=1))
    return results


def write_row(pair: str, results: dict[str, dict[str, Any]]) -> None:
    """Put a pair's row into the table of docs/versions.md, in the place of an older one."""
    python, torch = pair.split(":")
    sums = [str(sum(counts.get(word, 0) for counts in results.values())) for word in COUNTS]
    names = "; ".join(f"`{name}`" for counts in results.values() for name in counts["not passed"]) or "none"
    cells = [python, torch, *sums, str(datetime.date.today()), names]
    lines = PAGE.read_text().splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith(f"| {python} | {torch} |")]
    end = max(i for i, line in enumerate(lines) if line.startswith("|")) + 1
    lines[at[0] if at else end : at[0] + 1 if at else end] = [f"| {' | '.join(cells)} |"]
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="*", help="PYTHON:TORCH, as in 3.12:2.14.1 (default: all)")
    parser.add_argument(
        "--rooms", nargs="+", default=[], help='run these rooms again; "." is the files of tests/ itself'
    )
    parser.add_argument("--python", type=Path, help="the interpreter of an environment to use as it is")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=3600, help="seconds for one room")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args()
    (ROOT / "build" / "versions").mkdir(parents=True, exist_ok=True)
    bad = 0
    for pair in options.pairs or PAIRS:
        version, torch = pair.split(":")
        if options.python is None and shutil.which(f"python{version}") is None:
            print(f"{pair}: there is no python{version} on PATH", flush=True)
            continue
        python = options.python or environment(version, torch) / "bin/python"
        results = run_pair(pair, python, options.rooms, options.jobs, options.limit)
        bad += sum(len(counts["not passed"]) or counts.get("errors", 0) for counts in results.values())
        if not set(rooms()) - set(results):
            write_row(pair, results)
        if options.python is None and not options.keep:
            shutil.rmtree(python.parents[1])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
