"""Times the matrix products of the bench's models against generated kernels, and writes those that win as the
stored table.

python -m bench.gpu_gemm --budget 400 --json gemm.json        # then, anywhere: --rows gemm.json --table

The table (dynamotor/codegen/gemm_table.json) decides for the default mode; `mode="max-autotune"` measures
by itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bench.tool import write_json
from dynamotor.api import compile as compile_, reset
from dynamotor.base.events import Event, collect
from dynamotor.codegen import gemm_table
from dynamotor.codegen.triton_gemm import Tiling

from .gpu_programs import BATCH, Workload


def rows_of(events: Iterable[Event]) -> dict[str, dict[str, Any]]:
    """A row for each product that was timed: the library's milliseconds, the best template's, and its
    tiling.
    """
    keys = ("tiling", "wins", "library_ms", "template_ms")
    return {f"{e.data['gpu']} {e.data['label']}": {k: e.data[k] for k in keys} for e in events}


def measure(model: str, mode: str, device: str, tiny: bool, times: float = 1.0) -> dict[str, dict[str, Any]]:
    """One step of a model with every product timed. times: of the usual number of samples."""
    job = {
        "mode": mode,
        "model": model,
        "batch": round(times * BATCH.get(model, 32)),
        "device": device,
        "tiny": tiny,
    }
    work = Workload(job)
    work.to_device()
    with gemm_table.ignored(), collect("autotune") as events:
        work.step(compile_(work.model, mode="max-autotune-no-cudagraphs"))
    return rows_of(events)


def foretold(rows: dict[str, dict[str, Any]]) -> str:
    """How often the table says of products that it does not have whether a template wins, and how often it is
    right.
    """
    said = {key: gemm_table.nearest(key) for key in rows if key not in gemm_table.table()}
    right = sum((tiling is not None) == rows[key]["wins"] for key, tiling in said.items())
    taken = [
        rows[key]["template_ms"] / rows[key]["library_ms"]
        for key, tiling in said.items()
        if tiling is not None
    ]
    worst = f", at worst {max(taken):.3f} of the library's time" if taken else ""
    return f"{right} of {len(said)} new products foretold; {len(taken)} templates{worst} (each with its own best tiling)"


def write_table(rows: dict[str, dict[str, Any]], path: Path) -> int:
    """Add measurements to the table: tilings of winners, null where the library was faster; how many
    won.
    """
    report = json.loads(path.read_text())
    report["rows"] |= {
        key: Tiling(**row["tiling"]).row() if row["wins"] else None for key, row in rows.items()
    }
    path.write_text(_as_text(report["about"], report["rows"]))
    return sum(row["wins"] for row in rows.values())


def _as_text(about: str, rows: dict[str, dict[str, int] | None]) -> str:
    """The table with a line for each row."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rows.items()))
    return f'{{\n "about": {json.dumps(about)},\n "rows": {{\n{lines}\n }}\n}}\n'


def main() -> int:
    """Measure, or write the table from measurements."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_gemm")
    parser.add_argument("--models", default=",".join(BATCH))
    parser.add_argument("--modes", default="train,infer")
    parser.add_argument(
        "--budget", type=float, default=400.0, help="seconds after which no further model is started"
    )
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--rows", default="", help="a file of measured rows: nothing is measured")
    parser.add_argument("--table", action="store_true", help="write them into the stored table")
    parser.add_argument(
        "--times", type=float, default=1.0, help="of the usual samples: what does the table say of others?"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.rows and args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU in this machine: nothing is measured")
        return 0
    end = time.monotonic() + args.budget
    rows: dict[str, dict[str, Any]] = json.loads(Path(args.rows).read_text()) if args.rows else {}
    for model in [] if args.rows else args.models.split(","):
        for mode in args.modes.split(","):
            if time.monotonic() > end:
                print(f"not run for want of time: {mode}/{model}")
                continue
            start = time.monotonic()
            rows |= measure(model, mode, args.device, args.tiny, args.times)
            reset()
            write_json(args.json, rows)
            print(
                f"{mode}/{model}: {len(rows)} products so far, {time.monotonic() - start:.1f} s", flush=True
            )
    for key, row in sorted(rows.items(), key=lambda item: item[1]["template_ms"] / item[1]["library_ms"]):
        print(
            f"{row['template_ms'] / row['library_ms']:.3f} of the library's {row['library_ms']:.4f} ms: {key} {row['tiling']}"
        )
    print(foretold(rows))
    if args.table:
        print(f"{write_table(rows, gemm_table.PATH)} rows of {gemm_table.PATH}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
