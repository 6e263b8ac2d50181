"""PyTorch's OpInfo database through the xla device, forward and gradient, beside CPU eager.

>>> python -m dynamotor.tools.xla_opinfo --dtypes float32,int64,bool,bfloat16 --samples 3 --json docs/results/xla-opinfo.json

A cell is an op (with its variant) and a dtype. It passes when results, and gradients where the op has them, equal the CPU's
within the tolerances below for every sample; ops that draw random numbers or return uninitialised memory are compared by shape
and dtype. `fell back` cells ran at least one op on the CPU. Workers write a line per cell, so that one that dies costs one
cell.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# (relative, absolute)
TOLERANCE = {
    "float32": (1e-4, 1e-5),
    "float64": (1e-7, 1e-7),
    "bfloat16": (1.6e-2, 1e-2),
    "float16": (1e-2, 1e-3),
    "complex64": (1e-4, 1e-5),
}
SHAPE_ONLY = re.compile(
    r"(empty|bernoulli|cauchy|exponential|geometric|log_normal|multinomial|normal|rand|uniform|dropout|rrelu|resize_"
    r"|svd_lowrank|pca_lowrank|new_empty|scaled_dot_product_attention_dropout)"
)


def cells(dtypes: list[str], only: str) -> list[tuple[str, str, str]]:
    """(op, variant, dtype) of the database that the CPU supports."""
    import torch  # noqa: PLC0415 - workers import it; the parent only lists
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415

    return [
        (info.name, info.variant_test_name, dtype)
        for info in op_db
        for dtype in dtypes
        if getattr(torch, dtype) in info.dtypes and re.search(only, info.name)
    ]


def check_cell(name: str, variant: str, dtype: str, samples: int) -> dict[str, Any]:
    """Run one cell: {"status": "pass" | "wrong" | "error", "fell_back": [...], "reason": ...}."""
    import torch  # noqa: PLC0415
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415

    from dynamotor.xla import metrics  # noqa: PLC0415 - starts jax, in workers only

    info = next(o for o in op_db if o.name == name and o.variant_test_name == variant)
    kind = getattr(torch, dtype)
    gradient = kind in info.dtypes and kind.is_floating_point and info.supports_autograd
    metrics.clear()
    row: dict[str, Any] = {"op": name + (f".{variant}" if variant else ""), "dtype": dtype, "status": "pass", "samples": 0}
    torch.manual_seed(0)
    for index, sample in enumerate(info.sample_inputs("cpu", kind, requires_grad=gradient)):
        if index >= samples:
            break
        try:
            expected = run_sample(info, sample, "cpu", gradient)
        except Exception:  # noqa: BLE001 - a sample that the CPU refuses says nothing
            continue
        row["samples"] += 1
        try:
            compare(run_sample(info, sample, "xla", gradient), expected, shape_only=bool(SHAPE_ONLY.search(name)))
        except AssertionError as error:
            row.update(status="wrong", reason=f"sample {index}: {str(error)[:300]}")
            break
        except Exception as error:  # noqa: BLE001 - reported
            row.update(status="error", reason=f"sample {index}: {type(error).__name__}: {str(error)[:300]}")
            break
    row["fell_back"] = sorted(n.removeprefix("aten::") for n in metrics.all_counters() if n.startswith("aten::"))
    return row


def run_sample(info: Any, sample: Any, device: str, gradient: bool) -> tuple[list[Any], list[Any]]:
    """(results, gradients) of one sample on a device, as CPU values."""
    import torch  # noqa: PLC0415
    from torch.utils._pytree import tree_leaves, tree_map  # noqa: PLC0415

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            moved = value.detach().clone() if device == "cpu" else value.detach().to(device)
            return moved.requires_grad_(value.requires_grad)
        return torch.device(device) if isinstance(value, torch.device) or value == "cpu" else value

    moved = tree_map(place, (sample.input, sample.args, sample.kwargs))
    result = info(moved[0], *moved[1], **moved[2])
    if sample.output_process_fn_grad is not None and gradient:
        result = sample.output_process_fn_grad(result)
    outputs = tree_leaves(result)
    grads: list[Any] = []
    if gradient:
        wanting = [t for t in tree_leaves(moved) if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
        graded = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
        if wanting and graded:
            weights = [torch.ones_like(t) for t in graded]
            grads = list(torch.autograd.grad(graded, wanting, weights, allow_unused=True))
    host = lambda v: v.detach().cpu() if isinstance(v, torch.Tensor) else v  # noqa: E731
    return [host(v) for v in outputs], [host(v) for v in grads]


def compare(mine: tuple, expected: tuple, shape_only: bool) -> None:
    """AssertionError where results or gradients differ."""
    import torch  # noqa: PLC0415

    for what, left, right in (("result", mine[0], expected[0]), ("gradient", mine[1], expected[1])):
        assert len(left) == len(right), f"{len(left)} {what}s, the CPU gives {len(right)}"
        for index, (a, b) in enumerate(zip(left, right)):
            if not isinstance(b, torch.Tensor):
                assert shape_only or a == b or (a != a and b != b) or (isinstance(b, float) and abs(a - b) <= 1e-4 * abs(b)), (
                    f"{what} {index}: {a} is not {b}"
                )
                continue
            assert a.shape == b.shape and a.dtype == b.dtype, (
                f"{what} {index}: {a.dtype}{list(a.shape)}, the CPU gives {b.dtype}{list(b.shape)}"
            )
            if not shape_only:
                relative, absolute = TOLERANCE.get(str(b.dtype).removeprefix("torch."), (0, 0))
                torch.testing.assert_close(
                    a,
                    b,
                    rtol=relative,
                    atol=absolute,
                    equal_nan=True,
                    check_stride=False,
                    msg=lambda text, what=what, index=index: f"{what} {index}: {text}",
                )


def work(samples: int) -> None:
    """A worker: reads cells from stdin as JSON lines, writes a row for each."""
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        cell = json.loads(line)
        print(json.dumps({"start": cell}), flush=True)
        print(json.dumps({"row": check_cell(*cell, samples)}), flush=True)


def run_all(todo: list[tuple[str, str, str]], samples: int, timeout: float) -> Iterator[dict[str, Any]]:
    """Rows of all cells; a worker that dies or hangs is replaced, its cell is an error."""
    while todo:
        command = [sys.executable, "-m", "dynamotor.tools.xla_opinfo", "--worker", "--samples", str(samples)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as worker:
            for row in _drive(worker, todo, timeout):
                yield row
                if row.get("died"):
                    break


def _drive(worker: subprocess.Popen, todo: list[tuple[str, str, str]], timeout: float) -> Iterator[dict[str, Any]]:
    import threading  # noqa: PLC0415

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="float32,int64,bool,bfloat16")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", default="", help="regular expression of op names")
    parser.add_argument("--every", type=int, default=1, help="take each n-th cell")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one cell")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", default="")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.samples)
        return 0
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
            print(f"{row['status']:>6} {row['op']} {row['dtype']}: {row['reason'].splitlines()[0][:160]}", flush=True)
    return rows


def report(rows: list[dict[str, Any]], args: argparse.Namespace, seconds: float) -> int:
    """Print and write shares by dtype."""
    import torch  # noqa: PLC0415

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
            "torch": torch.__version__,
            "python": platform.python_version(),
            "seconds": round(seconds),
            "tolerance": TOLERANCE,
            "summary": table,
            "not_passed": [r for r in rows if r["status"] != "pass"],
            "fell_back": sorted({f"{r['op']}: {', '.join(r['fell_back'])}" for r in rows if r["fell_back"]}),
        }
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
