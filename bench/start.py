"""`python -m dynamotor bench --start`: the cost of the first call, in a process that finds nothing and in one
that finds a cache.

Each number is a first call minus an eager call of the same process, in seconds of the clock and of the
process's processors (which say more where others use the machine). Compilers take turns, each round with a
cold process and then warm ones. `--beside FOLDER` adds the same with the checkout of another commit, whose
extension is built (`python setup.py build_ext --inplace`), and the median over the rounds of this one's
seconds over that one's.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from statistics import median
from typing import Any

from bench.tool import write_json
from dynamotor.tools.tables import render

COLUMNS = ("model", "phase", "compiler", "cold s", "cold cpu s", "second s", "second cpu s", "eager s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only `--start` has; models, phase, compilers, batch, small, timeout and json are the
    bench's.
    """
    parser.add_argument(
        "--start", action="store_true", help="first calls: cold and in a second process, minus an eager call"
    )
    parser.add_argument(
        "--warm", type=int, default=2, help="with --start: processes that find the cache, after each cold one"
    )
    parser.add_argument("--start-rounds", type=int, default=1, help="with --start: rounds of all compilers")
    parser.add_argument("--beside", metavar="FOLDER", help="with --start: dynamotor of another checkout, too")


def main(args: argparse.Namespace) -> int:
    """Measure, print a table with medians, write JSON; 0 when every process gave a result."""
    from .command import names_of, run_worker

    rows, failed = [], False
    checkouts: dict[str, str | None] = dict.fromkeys(args.compilers.split(","))
    if args.beside:
        checkouts |= {"dynamotor": None, f"dynamotor of {args.beside}": args.beside}
    for name in names_of(args.models):
        for phase in args.phase.split(","):
            found: dict[str, dict[str, list[Any]]] = {}
            for turn in range(args.start_rounds):
                for compiler, checkout in list(checkouts.items())[:: 1 - 2 * (turn % 2)]:
                    job = {
                        "model": name,
                        "phase": phase,
                        "compiler": compiler.partition(" ")[0],
                        "device": args.device,
                        "amp": args.amp,
                        "batch": args.batch,
                        "small": args.small,
                        "task": "start",
                    }
                    cache = tempfile.mkdtemp(prefix="dynamotor-start-")
                    try:
                        done = [run_worker(job, cache, args.timeout, checkout) for _ in range(1 + args.warm)]
                    finally:
                        shutil.rmtree(cache, ignore_errors=True)
                    failed |= any("error" in one for one in done)
                    mine = found.setdefault(compiler, {"cold": [], "second": []})
                    for kind, ones in (("cold", done[:1]), ("second", done[1:])):
                        mine[kind] += [one for one in ones if "error" not in one]
            rows += [
                _row(name, phase, compiler, results)
                for compiler, results in found.items()
                if results["second"]
            ]
            print(render([_text(row) for row in rows[-len(found) :]], COLUMNS), flush=True)
            if args.beside:
                rows[-1] |= (ratios := _ratios(found["dynamotor"], found[f"dynamotor of {args.beside}"]))
                print({key: round(value, 3) for key, value in ratios.items()}, flush=True)
    print("\n" + render([_text(row) for row in rows], COLUMNS))
    write_json(args.json, rows)
    return int(failed)


def _row(name: str, phase: str, compiler: str, results: dict[str, list[Any]]) -> dict[str, Any]:
    """Medians of first calls minus eager ones."""
    row: dict[str, Any] = {"model": name, "phase": phase, "compiler": compiler}
    for kind, ones in results.items():
        for k, unit in enumerate(("s", "cpu s")):
            row[f"{kind} {unit}"] = median(one["first"][k] - one["eager"][k] for one in ones)
    row["eager s"] = median(one["eager"][0] for one in results["second"])
    return row


def _ratios(ours: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> dict[str, float]:
    """The median of ratios of first calls, each minus its eager call; also with the eager call in both."""
    found = {}
    for kind, ones in ours.items():
        pairs = list(zip(ones, theirs[kind], strict=False))
        for text, part in (("", 1), (" with its run", 0)):
            seconds = [[one["first"][0] - part * one["eager"][0] for one in pair] for pair in pairs]
            found[f"ratio {kind}{text}"] = median(a / b for a, b in seconds)
    return found


def _text(row: dict[str, Any]) -> list[str]:
    return [f"{row[column]:.2f}" if isinstance(row[column], float) else row[column] for column in COLUMNS]
