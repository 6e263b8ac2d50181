"""PyTorch's OpInfo database through the xla device, forward and gradient, beside CPU eager.

>>> python -m bench.xla_opinfo --dtypes float32,int64,bool,bfloat16 --samples 3 --json docs/results/xla-opinfo.json

A cell is an op (with its variant) and a dtype. It passes when results, and gradients where the op has them,
equal the CPU's within the worker's tolerances for every sample; ops that draw random numbers or return
uninitialised memory are compared by shape and dtype. `fell back` cells ran at least one op on the CPU.
Workers write a line per cell, so that one that dies costs one cell.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from bench.tool import write_json


def cells(dtypes: list[str], only: str) -> list[tuple[str, str, str]]:
    """(op, variant, dtype) of the database that the CPU supports."""
    return [
        (info.name, info.variant_test_name, dtype)
        for info in op_db
        for dtype in dtypes
        if getattr(torch, dtype) in info.dtypes and re.search(only, info.name)
    ]


def run_all(todo: list[tuple[str, str, str]], samples: int, timeout: float) -> Iterator[dict[str, Any]]:
    """Rows of all cells; a worker that dies or hangs is replaced, its cell is an error."""
    while todo:
        command = [sys.executable, "-m", "bench.xla_opinfo_worker", str(samples)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as worker:
            for row in _drive(worker, todo, timeout):
                yield row
                if row.get("died"):
                    break


def _drive(
    worker: subprocess.Popen, todo: list[tuple[str, str, str]], timeout: float
) -> Iterator[dict[str, Any]]:
    while todo:
        cell = todo.pop(0)
        watchdog = threading.Timer(timeout, worker.kill)
        watchdog.start()
        try:
            worker.stdin.write(json.dumps(cell) + "\n")
            worker.stdin.flush()
            row = None
            while row is None:
                line = worker.stdout.readline()
                if not line:
                    break
                row = json.loads(line).get("row") if line.startswith("{") else None
        except BrokenPipeError:
            row = None
        watchdog.cancel()
        if row is None:
            worker.kill()
            yield {
                "op": cell[0] + (f".{cell[1]}" if cell[1] else ""),
                "dtype": cell[2],
                "status": "error",
                "reason": "the process died or hung",
                "fell_back": [],
                "samples": 0,
                "died": True,
            }
            return
        yield row
    worker.stdin.close()


def main() -> int:
    """Run the cells and write the summary and every cell that is not a plain pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", default="float32,int64,bool,bfloat16")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", default="", help="regular expression of op names")
    parser.add_argument("--every", type=int, default=1, help="take each n-th cell")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one cell")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    start, rows = time.time(), []
    todo = cells(args.dtypes.split(","), args.only)[:: args.every]
    with ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(lambda i: _shard(todo[i :: args.jobs], args), range(args.jobs)):
            rows += found
    return report(rows, args, time.time() - start)


def _shard(todo: list[tuple[str, str, str]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of some cells, printed as they come when they did not pass."""
    rows = []
    for row in run_all(todo, args.samples, args.timeout):
        if row["samples"]:
            rows.append(row)
        if row["status"] != "pass":
            print(
                f"{row['status']:>6} {row['op']} {row['dtype']}: {row['reason'].splitlines()[0][:160]}",
                flush=True,
            )
    return rows


def report(rows: list[dict[str, Any]], args: argparse.Namespace, seconds: float) -> int:
    """Print and write shares by dtype."""

    table = {}
    for dtype in [*args.dtypes.split(","), "all"]:
        mine = [r for r in rows if dtype in (r["dtype"], "all")]
        passed, fell = sum(r["status"] == "pass" for r in mine), sum(bool(r["fell_back"]) for r in mine)
        table[dtype] = {
            "cells": len(mine),
            "passed": passed,
            "share": passed / max(len(mine), 1),
            "fell_back": fell,
            "fallback_share": fell / max(len(mine), 1),
        }
        print(
            f"{dtype:>9}: {passed}/{len(mine)} equal to CPU eager ({table[dtype]['share']:.1%}), "
            f"{fell} fell back ({table[dtype]['fallback_share']:.1%})"
        )
    if args.json:
        result = {
            "command": " ".join(sys.argv[1:]),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "seconds": round(seconds),
            "summary": table,
            "not_passed": [r for r in rows if r["status"] != "pass"],
            "fell_back": sorted({f"{r['op']}: {', '.join(r['fell_back'])}" for r in rows if r["fell_back"]}),
        }
        write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
