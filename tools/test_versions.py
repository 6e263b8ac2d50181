"""Runs the test suite on each pair of a Python and a PyTorch, one environment at a time, and writes the counts.

    python tools/test_versions.py                        every row of PAIRS whose Python is on PATH
    python tools/test_versions.py 3.11:2.14.1 --keep     one pair; its environment stays in build/versions
    python tools/test_versions.py --tests tests/capture  some tests; docs/versions.md is not written

An environment of a CUDA build takes about 6 GB; it is removed before the next one is made.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
# Each PyTorch with at least two Pythons, and each Python with the newest PyTorch.
PAIRS = ("3.11:2.11.0", "3.12:2.11.0", "3.11:2.13.0", "3.12:2.13.0", "3.13:2.13.0",
         "3.11:2.14.1", "3.12:2.14.1", "3.13:2.14.1", "3.14:2.14.1")  # fmt: skip
VISION = {
    "2.11": "0.26.0",
    "2.12": "0.27.0",
    "2.13": "0.28.0",
    "2.14": "0.29.1",
}  # the torchvision of a PyTorch
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
        ["--no-build-isolation", "--no-deps", "-e", "."],
    ):
        pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, "--no-compile", *packages], check=True, cwd=ROOT)
    return folder


def run_tests(folder: Path, tests: list[str], jobs: int) -> tuple[dict[str, int], list[str]]:
    """Counts by outcome, and the names of the tests that did not pass."""
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [folder / "bin/python", "-m", "pytest", *tests, "-n", str(jobs), "--dist", "worksteal", "-rfE"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | single, stdout=subprocess.PIPE, text=True)
    found = re.findall(r"(\d+) (passed|failed|skipped|error)s?\b", done.stdout.splitlines()[-1])
    counts = {word if word != "error" else "errors": int(n) for n, word in found}
    return counts, re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)


def write_row(pair: str, counts: dict[str, int], failed: list[str]) -> None:
    """Put a pair's row into the table of docs/versions.md, in the place of an older one."""
    python, torch = pair.split(":")
    names = "; ".join(f"`{name}`" for name in failed) or "none"
    cells = [python, torch, *(str(counts.get(word, 0)) for word in COUNTS), str(datetime.date.today()), names]
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
    parser.add_argument("--tests", nargs="+", help="only these tests")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args()
    bad = 0
    for pair in options.pairs or PAIRS:
        python, torch = pair.split(":")
        if shutil.which(f"python{python}") is None:
            print(f"{pair}: there is no python{python} on PATH", flush=True)
            continue
        folder = environment(python, torch)
        counts, failed = run_tests(folder, options.tests or ["tests"], options.jobs)
        print(f"{pair}: {counts} {failed}", flush=True)
        bad += len(failed)
        if not options.tests:
            write_row(pair, counts, failed)
        if not options.keep:
            shutil.rmtree(folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
