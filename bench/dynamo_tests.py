"""torchdynamo's own tests, asked of stock torch.compile and of dynamotor: which pass where, and why not.

python -m bench dynamo_tests PATH [--names FILE] [--json docs/results/dynamo-tests.json] [--files test_misc,test_repros]

PATH is a folder test/dynamo of PyTorch's sources (any version: names that this PyTorch lacks are stood in
for). FILE names the tests that count, a line each, FILE::Class::test; a test that has moved to another file
since is looked for there. What cannot be asked of another compiler has a row in dynamo_tests.tsv: a part of
"Class.test: error" and the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.tool import read_json, write_json

_FILES = """
    test_functions test_misc test_repros test_modules test_subgraphs test_export test_unspec test_global
    test_model_output test_nops test_optimizers test_python_autograd test_recompile_ux test_skip_non_tensor
    test_verify_correctness test_decorators test_ctx_manager test_autograd_function test_higher_order_ops
    test_debug_utils
"""
FILES = _FILES.split()
WAYS = ("stock", "dynamotor")
REASONS = Path(__file__).with_suffix(".tsv")
Rows = dict[str, dict[str, str]]


def run(
    path: Path,
    file: str,
    way: str,
    only: Sequence[str],
    seconds: float,
    plugin: str = "bench.dynamo_stand_ins",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Rows:
    """Each test of a file: its outcome and why. A test that ends the process has failed; the rest go on.

    settings: further environment variables.
    """
    rows: Rows = {}
    while True:
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as notes:
            env = os.environ | {
                "DYNAMO_TESTS_WAY": way,
                "DYNAMO_TESTS_ROWS": notes.name,
                "DYNAMO_TESTS_ONLY": " ".join(only),
                "DYNAMO_TESTS_DONE": "\n".join(rows),
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
                ),
                **settings,
            }
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                plugin,
                "--noconftest",
                "--assert=plain",
            ]
            command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", f"{file}.py"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, cwd=path, env=env, capture_output=True, timeout=seconds)
            found = read(notes.read())
        cut_off = [name for name, row in found.items() if "outcome" not in row]
        for name in cut_off:
            found[name] = {"outcome": "failed", "why": "the process ended"}
        rows |= found
        if not cut_off:
            return rows


def read(text: str) -> Rows:
    """The rows that the plugin wrote; a failure before or after a test replaces its outcome."""
    rows: Rows = {}
    for line in text.splitlines():
        row = json.loads(line)
        rows.setdefault(row.pop("test"), {}).update({} if "started" in row else row)
    return rows


def chosen(names: Sequence[str], rows: dict[str, dict[str, Rows]]) -> dict[str, str]:
    """For each name that counts, its row as "file::Class.test"; names found nowhere are left out."""
    every = {f"{file}::{test}" for file, ways in rows.items() for test in ways.get(WAYS[0], {})}
    by_test: dict[str, str] = {}
    order = {file: k for k, file in enumerate(FILES)}
    for one in sorted(every, key=lambda one: (order.get(one.partition("::")[0], len(order)), one)):
        by_test.setdefault(one.rpartition(".")[2], one)
    found = {}
    for name in names:
        file, owner, test = name.split("::")
        here = f"{file}::{owner}.{test}"
        place = here if here in every else by_test.get(test)
        if place is not None:
            found[name] = place
    return found


def reason(test: str, row: dict[str, str], table: Sequence[tuple[str, str]]) -> str:
    """Why a test cannot be asked of another compiler, "" where it could."""
    text = f"{test}: {row.get('why', '')}"
    return next((why for part, why in table if part in text), "")


def reasons(path: Path = REASONS) -> list[tuple[str, str]]:
    """The table: part of a row's text, reason."""
    lines = path.read_text().splitlines()
    return [tuple(line.split("\t")) for line in lines if line and not line.startswith("#")]  # type: ignore[misc]


def totals(rows: dict[str, dict[str, Rows]], places: Sequence[str]) -> dict[str, Any]:
    """How many pass, fail and are skipped each way; what only stock passes, by reason."""
    table = reasons()
    counts: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    only_theirs: Counter[str] = Counter()
    open_: list[str] = []
    only_ours = 0
    for place in places:
        file, _, test = place.partition("::")
        for way in WAYS:
            counts[way][rows[file].get(way, {}).get(test, {}).get("outcome", "not run")] += 1
        theirs, ours = (rows[file].get(way, {}).get(test, {}) for way in WAYS)
        only_ours += ours.get("outcome") == "passed" != theirs.get("outcome")
        if theirs.get("outcome") == "passed" and ours.get("outcome") != "passed":
            why = reason(test, ours, table)
            only_theirs[why or "open"] += 1
            if not why:
                open_.append(f"{place}: {ours.get('why', '')}"[:200])
    return {
        "tests": len(places),
        **{way: dict(found) for way, found in counts.items()},
        "only dynamotor passes": only_ours,
        "only stock passes": dict(only_theirs.most_common()),
        "open": open_,
    }


def section(found: dict[str, Any]) -> list[str]:
    """What docs/libraries.md says of a file that `write` wrote."""
    counted = found["totals"]
    theirs, ours = (counted[way] for way in WAYS)
    lines = ["## torchdynamo's own tests", "", ABOUT, ""]
    lines += [
        f"Of {counted['named']} named {counted['tests']} are there: stock passes {theirs['passed']}, dynamotor {ours['passed']}. "
        f"dynamotor also passes {counted['only dynamotor passes']} that stock does not."
    ]
    lines += ["", "| what stock alone passes | tests |", "|---|---|"]
    lines += [
        f"| {why if why != 'open' else 'open'} | {n} |" for why, n in counted["only stock passes"].items()
    ]
    left = [f"- `{one.partition(': ')[0]}`" for one in counted["open"]]
    return [*lines, "", "Open:", "", *left] if left else lines


ABOUT = """The tests that torchdynamo had in 2022, as they are in PyTorch 2.6, run by PyTorch 2.13: once as they are, once with `torch.compile`,
`torch._dynamo.optimize`, `export` and their kin answered by dynamotor (`bench/dynamo_stand_ins.py`). They count graphs and calls of a backend
that only counts. `python -m bench dynamo_tests PATH --names FILE --json docs/results/dynamo-tests.json` wrote the figures."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--names", type=Path, help="the tests that count")
    parser.add_argument("--json", help="file for the figures; an earlier run's are kept")
    parser.add_argument("--files", default=",".join(FILES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--only", default="", help="names of tests, comma-separated: for one look")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for one file")
    options = parser.parse_args()
    before = read_json(options.json)
    rows: dict[str, dict[str, Rows]] = before.get("rows", {})
    names = options.names.read_text().split() if options.names else []
    asked = [part for part in options.only.split(",") if part] or sorted({n.split("::")[2] for n in names})
    for file in options.files.split(","):
        if not (options.path / f"{file}.py").exists():
            continue
        for way in options.ways.split(","):
            found = run(options.path, file, way, asked, options.seconds)
            kept = rows.get(file, {}).get(way, {}) if options.only else {}
            rows.setdefault(file, {})[way] = kept | found
            print(f"{file} {way}: {dict(Counter(r['outcome'] for r in found.values()))}", flush=True)
        write(options.json, rows, names)


def write(path: str | None, rows: dict[str, dict[str, Rows]], names: Sequence[str]) -> None:
    """The file: totals and one row a test."""
    every = [f"{file}::{test}" for file, ways in rows.items() for test in ways.get(WAYS[0], {})]
    places = sorted(set(chosen(names, rows).values())) if names else every
    counted = totals(rows, places) | {
        "named": len(names),
        "named and absent": len(names) - len(chosen(names, rows)),
    }
    write_json(path, {"totals": counted, "rows": rows}, sort_keys=True)


if __name__ == "__main__":
    main()
