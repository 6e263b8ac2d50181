"""`python -m dynamotor bench`: models × phases × compilers, each pair in a fresh process with fresh caches.

First call cold and warm (a second process on the same cache), steady state interleaved with eager, errors
against eager, graphs and breaks, and the part of a step's torch calls that runs compiled. Prints a table; --json writes the figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.tool import run_tool, write_json
from bench.turns import geometric_mean
from dynamotor.base.errors import UsageError
from dynamotor.tools.tables import render

from . import ddp, models, shapes, start, step
from .numerics import Errors

COLUMNS = (
    "model",
    "phase",
    "compiler",
    "cold s",
    "warm s",
    "eager ms",
    "ms",
    "speedup",
    "spread",
    "err out",
    "err grad",
    "graphs",
    "breaks",
    "compiled",
    "pass",
)
TOLERANCE = {"none": 1e-3, "bf16": 5e-2, "fp16": 2e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the bench command."""
    parser.add_argument(
        "--models", default="twelve", help="names, comma-separated; a list file; 'twelve' or 'all'"
    )
    parser.add_argument("--phase", default="infer,train", help="infer, train or both, comma-separated")
    parser.add_argument(
        "--compilers",
        default="eager,dynamotor",
        help="eager, inductor, dynamotor, aot_eager or any torch.compile backend, comma-separated",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", choices=("none", "bf16", "fp16"), default="none")
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--small", action="store_true", help="reduced depth and size")
    parser.add_argument("--seconds", type=float, default=6.0, help="time for the steady state of each pair")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds allowed to each process")
    parser.add_argument("--no-warm", action="store_true", help="skip the second process")
    parser.add_argument(
        "--precision",
        choices=("highest", "high", "medium"),
        default="highest",
        help="torch.set_float32_matmul_precision, with --xla",
    )
    parser.add_argument(
        "--merge",
        action="append",
        default=[],
        metavar="EARLIER.json",
        help="with --xla or --shapes: start from these rows; with --models '' only merge",
    )
    parser.add_argument(
        "--xla",
        action="store_true",
        help="lazy XLA device against the bridges (models: small, seed, or names)",
    )
    parser.add_argument(
        "--overhead",
        action="store_true",
        help="with --xla: what recording an operation and a bridge call cost",
    )
    ddp.add_arguments(parser)
    shapes.add_arguments(parser)
    start.add_arguments(parser)
    step.add_arguments(parser)
    parser.add_argument("--json", help="file for the figures")


def names_of(spec: str) -> list[str]:
    """Model names of `--models`: a keyword, a list file ("timm NAME" / "hf NAME" lines) or comma-separated
    names.
    """
    if spec == "twelve":
        return list(models.TWELVE)
    if spec == "all":
        return models.names()
    if Path(spec).is_file():
        return models.names(spec)
    return [name for name in spec.split(",") if name]


def run_worker(
    job: dict[str, Any], cache: str, timeout: float, checkout: str | None = None
) -> dict[str, Any]:
    """One measurement in a fresh process; its last line of output is JSON. checkout: a folder with another
    version of the project, with its extension built, which runs instead of this one.
    """
    env = dict(
        os.environ,
        DYNAMOTOR_CACHE_DIR=f"{cache}/dynamotor",
        TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor",
        TRITON_CACHE_DIR=f"{cache}/triton",
    )
    if checkout is not None:
        env["PYTHONPATH"] = os.pathsep.join((checkout, f"{checkout}/xla"))
    command = [sys.executable, "-m", "bench.worker", json.dumps(job)]
    try:
        done = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(lines[-1])


def measure(job: dict[str, Any], *, warm: bool, timeout: float) -> dict[str, Any]:
    """Cold run, second process on the same cache, and the error check, for one (model, phase, compiler)."""
    cache = tempfile.mkdtemp(prefix="dynamotor-bench-")
    try:
        row = run_worker(dict(job, task="time"), cache, timeout)
        if warm and "error" not in row and job["compiler"] != "eager":
            again = run_worker(dict(job, task="first_call"), cache, timeout)
            row["warm_s"] = again.get("first_call_s")
        if "error" not in row and job["compiler"] != "eager":
            row |= run_worker(dict(job, task="errors"), cache, timeout)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    row["pass"] = "error" not in row and errors_are_fine(row, TOLERANCE[job["amp"]])
    return {**{k: job[k] for k in ("model", "phase", "compiler")}, **row}


def errors_are_fine(row: dict[str, Any], tolerance: float) -> bool:
    """Errors against float64 are small, or no larger than twice eager's own."""
    if "error_out" not in row:
        return True
    ours, eagers = (Errors(row[f"{k}error_out"], row[f"{k}error_grad"]) for k in ("", "eager_"))
    return ours.fine(eagers, tolerance)


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def table_row(row: dict[str, Any]) -> list[str]:
    """A row of the printed table."""
    t = row.get("timing") or {}
    spread = f"{t['low']:.2f}-{t['high']:.2f}" if t else "-"
    return [
        row["model"],
        row["phase"],
        row["compiler"],
        _number(row.get("first_call_s"), ".2f"),
        _number(row.get("warm_s"), ".2f"),
        _number(t.get("eager_ms"), ".1f"),
        _number(t.get("compiled_ms"), ".1f"),
        _number(t.get("speedup"), ".2f"),
        spread,
        _number(row.get("error_out"), ".1e"),
        _number(row.get("error_grad"), ".1e"),
        _number(row.get("graphs"), "d"),
        _number(row.get("breaks"), "d"),
        _number(row.get("compiled"), ".0%"),
        "yes" if row["pass"] else "NO " + row.get("error", "")[:80],
    ]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pass rate and geometric means for each compiler and phase."""
    found = []
    for phase in sorted({r["phase"] for r in rows}):
        for compiler in dict.fromkeys(r["compiler"] for r in rows):
            mine = [r for r in rows if (r["phase"], r["compiler"]) == (phase, compiler)]
            timed = [r for r in mine if r["pass"] and r.get("timing")]
            found.append(
                {
                    "phase": phase,
                    "compiler": compiler,
                    "models": len(mine),
                    "passed": sum(r["pass"] for r in mine),
                    "geomean_speedup": geometric_mean([r["timing"]["speedup"] for r in timed]),
                    "geomean_cold_s": geometric_mean([r["first_call_s"] for r in timed]),
                    "geomean_warm_s": geometric_mean([r["warm_s"] for r in timed if r.get("warm_s")]),
                }
            )
    return found


def main(args: argparse.Namespace) -> int:
    """Run the bench; 0 when every row passed."""
    if args.xla:  # needs jax, which not everybody has
        name = "xla_overhead" if args.overhead else "xla"
        return importlib.import_module(f"bench.{name}").main(args)
    if args.ddp:
        return ddp.main(args)
    if args.shapes:
        return shapes.main(args)
    if args.start:
        return start.main(args)
    if args.step:
        return step.main(args)
    phases = [p for p in args.phase.split(",") if p]
    if bad := [p for p in phases if p not in ("infer", "train")]:
        raise UsageError("DM101", f"unknown phase {bad[0]!r}", cure="use infer, train or infer,train")
    jobs = [
        {
            "model": m,
            "phase": p,
            "compiler": c,
            "device": args.device,
            "amp": args.amp,
            "batch": args.batch,
            "small": args.small,
        }
        | {"seconds": args.seconds}
        for m in names_of(args.models)
        for p in phases
        for c in args.compilers.split(",")
        if c
    ]
    rows = []
    for i, job in enumerate(jobs):
        if sys.stderr.isatty():
            print(
                f"\r\033[K[{i + 1}/{len(jobs)}] {job['model']} {job['phase']} {job['compiler']}",
                end="",
                file=sys.stderr,
            )
        rows.append(measure(job, warm=not args.no_warm, timeout=args.timeout))
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        print(
            render([table_row(rows[-1])], COLUMNS)
            if i == 0
            else render([table_row(rows[-1])], COLUMNS).splitlines()[1],
            flush=True,
        )
    print("\n" + render([table_row(r) for r in rows], COLUMNS))
    totals = summary(rows)
    for t in totals:
        print(
            f"{t['compiler']:>10} {t['phase']:>5}: {t['passed']}/{t['models']} pass, {t['geomean_speedup']:.3f}x eager, "
            f"first call {t['geomean_cold_s']:.2f} s cold, {t['geomean_warm_s']:.2f} s warm (geometric means)"
        )
    result = {
        "command": " ".join(sys.argv[1:]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "rows": rows,
        "summary": totals,
    }
    write_json(args.json, result)
    return 0 if all(r["pass"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(run_tool("bench", __doc__, add_arguments, main))
