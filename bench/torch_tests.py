"""PyTorch's own tests, each test method compiled: which pass in eager PyTorch and not so.

python -m bench torch_tests PATH [--files test_autograd,nn/test_pooling] [--backend aot_eager] [--only Class.test] [--json FILE]

PATH is the folder `test` of PyTorch's sources (any version: what fails in eager here does not count). A file
given again replaces its rows; with --only, those of the tests named.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from .dynamo_tests import Rows, run

FILES = "test_autograd,test_torch,test_view_ops,test_indexing,nn/test_module_hooks,nn/test_parametrization"
PLUGIN = "bench.torch_tests_plugin"
EAGER = "eager PyTorch"


def ask(path: Path, file: str, backend: str, only: list[str], seconds: float) -> Rows:
    """The rows of a file's tests, compiled with a backend ("": not compiled)."""
    os.environ["TORCH_TESTS_BACKEND"] = backend
    os.environ.setdefault("PYTORCH_TESTING_DEVICE_ONLY_FOR", "cpu")
    place = path / file
    return run(place.parent, place.name, backend, only, seconds, PLUGIN)


def failing(rows: Rows) -> list[str]:
    """The tests that neither passed nor were skipped."""
    return [test for test, row in rows.items() if row["outcome"] not in ("passed", "skipped")]


def totals(files: dict[str, dict[str, Rows]], way: str) -> dict[str, Any]:
    """How many tests there are, and those that fail only when they are compiled."""
    rows = {f"{file}::{test}": row for file, ways in files.items() for test, row in ways[way].items()}
    eager = {f"{file}::{test}" for file, ways in files.items() for test in failing(ways[EAGER])}
    return {
        "tests": len(rows),
        **Counter(row["outcome"] for row in rows.values()),
        "fail in eager too": sorted(set(failing(rows)) & eager),
        "fail compiled": {t: rows[t].get("why", "")[:200] for t in sorted(set(failing(rows)) - eager)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--files", default=FILES)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--only", default="", help="names of tests, comma-separated")
    parser.add_argument("--json", type=Path, default=Path("torch-tests.json"))
    parser.add_argument("--seconds", type=float, default=3000.0, help="for one file")
    options = parser.parse_args()
    before = json.loads(options.json.read_text()) if options.json.exists() else {}
    files: dict[str, dict[str, Rows]] = before.get("files", {})
    only = [part for part in options.only.split(",") if part]
    for file in options.files.split(","):
        compiled = ask(options.path, file, options.backend, only, options.seconds)
        failed = failing(compiled)
        eager = ask(options.path, file, "", failed, options.seconds) if failed else {}
        ways = files.setdefault(file, {EAGER: {}, options.backend: {}}) if only else {}
        files[file] = {
            EAGER: ways.get(EAGER, {}) | eager,
            options.backend: ways.get(options.backend, {}) | compiled,
        }
        found = totals(files, options.backend)
        options.json.write_text(
            json.dumps({"totals": found, "files": files}, indent=1, sort_keys=True) + "\n"
        )
        print(f"{file}: {dict(Counter(row['outcome'] for row in compiled.values()))}", flush=True)
    print("\n".join(f"{test}: {why}" for test, why in found["fail compiled"].items()))


if __name__ == "__main__":
    main()
