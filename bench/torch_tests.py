"""PyTorch's own tests, each test method compiled: which pass in eager PyTorch and not so.

python -m bench torch_tests PATH [--files test_autograd,nn/test_pooling] [--backend aot_eager] [--only Class.test] [--every N] [--json FILE]

PATH is the folder `test` of PyTorch's sources (any version: what fails in eager here does not count). A file
given again replaces its rows of that backend; with --only, those of the tests named. Why a difference is not
mended has a row in torch_tests.tsv: a part of "file::Class.test: error" and the reason.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path
from typing import Any

from bench.tool import read_json, write_json

from .dynamo_tests import Rows, reason, reasons, run

FILES = "test_autograd,test_torch,test_view_ops,test_indexing,nn/test_module_hooks,nn/test_parametrization"
PLUGIN = "bench.torch_tests_plugin"
EAGER = "eager PyTorch"
REASONS = Path(__file__).with_suffix(".tsv")


def ask(path: Path, file: str, backend: str, only: list[str], seconds: float) -> Rows:
    """The rows of a file's tests, compiled with a backend ("": not compiled)."""
    os.environ["TORCH_TESTS_BACKEND"] = backend
    os.environ.setdefault("PYTORCH_TESTING_DEVICE_ONLY_FOR", "cpu")
    place = path / file
    return run(place.parent, place.name, backend, only, seconds, PLUGIN)


def failing(rows: Rows) -> list[str]:
    """The tests that neither passed nor were skipped."""
    return [test for test, row in rows.items() if row["outcome"] not in ("passed", "skipped")]


def totals(files: dict[str, dict[str, Rows]]) -> dict[str, Any]:
    """For each backend: how many tests of each file pass, and those that fail only when they are compiled."""
    table = reasons(REASONS)
    found: dict[str, Any] = {}
    for file, ways in sorted(files.items()):
        eager = set(failing(ways[EAGER]))
        for way in sorted(ways.keys() - {EAGER}):
            of = found.setdefault(way, {"files": {}, "fail compiled": {}})
            failed = set(failing(ways[way]))
            of["files"][file] = {
                **Counter(row["outcome"] for test, row in ways[way].items() if test not in failed),
                "fail in eager too": len(failed & eager),
                "fail compiled": len(failed - eager),
            }
            for test in sorted(failed - eager):
                name, row = f"{file}::{test}", ways[way][test]
                why = " ".join(row.get("why", "").split())[:200]
                of["fail compiled"][name] = {"why": why, "reason": reason(name, row, table) or "open"}
    return found


def kept(rows: Rows) -> Rows:
    """The rows of the file: outcomes, and the reason where a test failed."""
    return {test: {k: row[k] for k in ("outcome", "why") if row.get(k)} for test, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--files", default=FILES)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--only", default="", help="names of tests, comma-separated")
    parser.add_argument("--json", help="file for the figures; an earlier run's are kept")
    parser.add_argument("--seconds", type=float, default=3000.0, help="for one file")
    parser.add_argument("--every", type=int, default=1, help="one of so many tests")
    options = parser.parse_args()
    os.environ["DYNAMO_TESTS_EVERY"] = str(options.every)
    before = read_json(options.json)
    files: dict[str, dict[str, Rows]] = before.get("files", {})
    every: dict[str, int] = before.get("one in", {})
    only = [part for part in options.only.split(",") if part]
    for file in options.files.split(","):
        compiled = kept(ask(options.path, file, options.backend, only, options.seconds))
        if not compiled:
            print(f"{file}: no test was found; it may not import here", flush=True)
            continue
        failed = failing(compiled)
        eager = kept(ask(options.path, file, "", failed, options.seconds)) if failed else {}
        ways = files.setdefault(file, {EAGER: {}})
        ways[EAGER] |= eager
        ways[options.backend] = (ways.get(options.backend, {}) if only else {}) | compiled
        if not only:
            every[f"{file} {options.backend}"] = options.every
        figures = {"totals": totals(files), "one in": every, "files": files}
        write_json(options.json, figures, sort_keys=True)
        print(f"{file}: {dict(Counter(row['outcome'] for row in compiled.values()))}", flush=True)
    found = totals(files).get(options.backend, {"fail compiled": {}})
    print("\n".join(f"{test}: {row['why']}" for test, row in found["fail compiled"].items()))


if __name__ == "__main__":
    main()
