"""PyTorch's operator database through the compiler on a GPU: each op is right, left to aten, or wrong.

>>> python -m dynamotor.tools.gpu_opinfo --dtypes float32,bfloat16 --samples 3 --json docs/results/gpu-opinfo.json

Workers write a line per op and dtype, so that one that dies (a failed assertion ends a CUDA context) costs one cell.
`--device cpu` runs the kernels in Triton's interpreter (set TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..api import compile as compile_
from ..base.config import config
from ..base.events import collect, counters

TOLERANCE = {"float64": (1e-7, 1e-7), "float32": (1e-4, 1e-4), "bfloat16": (2e-2, 2e-2), "float16": (5e-3, 5e-3)}
# Ops whose results are random or uninitialised: compared by shape and dtype.
UNCERTAIN = re.compile(
    "rand|bernoulli|multinomial|normal|dropout|empty|rrelu|uniform|cauchy|exponential|geometric|svd|pca|"
    "resize_|fractional|eig|qr|lu_|householder|ldl"
)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def run_sample(op: Any, sample: Any, dtype: str, target: str) -> Counter[str]:
    """One sample against eager; what it took. AssertionError when it is wrong."""
    torch.manual_seed(0)
    want = tensors(op.op(sample.input, *sample.args, **sample.kwargs))
    counters.clear()
    with config.patch(target=target), collect("kernel") as kernels:
        call = compile_(lambda x, args, kwargs: op.op(x, *args, **kwargs))
        torch.manual_seed(0)
        got = tensors(call(sample.input, sample.args, sample.kwargs))
    rtol, atol = TOLERANCE.get(dtype, (0, 0))
    assert len(got) == len(want), f"{len(got)} results, eager gives {len(want)}"
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{a.dtype}{list(a.shape)}, eager gives {b.dtype}{list(b.shape)}"
        if not UNCERTAIN.search(op.name):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
    return Counter(kernels=len(kernels), fell_back=sum(counters["fallback"].values()))


def run_cell(op: Any, dtype: str, device: str, samples: int) -> dict[str, Any]:
    """All samples of an op in a dtype."""
    cell: dict[str, Any] = {"op": f"{op.name} {op.variant_test_name}".strip(), "dtype": dtype}
    target = "triton" if device == "cpu" else ""
    total: Counter[str] = Counter()
    try:
        given = list(itertools.islice(op.sample_inputs(device, getattr(torch, dtype), requires_grad=False), samples))
        for sample in given:
            try:
                op.op(sample.input, *sample.args, **sample.kwargs)
            except Exception:  # eager refuses the sample too
                continue
            total += run_sample(op, sample, dtype, target)
    except AssertionError as error:
        return {**cell, "status": "wrong", "reason": str(error)[:300]}
    except Exception as error:
        return {**cell, "status": "error", "reason": f"{type(error).__name__}: {error}"[:300]}
    return {**cell, "status": "pass", "kernels": total["kernels"], "fell_back": total["fell_back"]}


def _database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def work(first: int, step: int, dtypes: list[str], device: str, samples: int) -> None:
    """A worker: ops first, first + step, ...; a line before and after each cell."""
    for number in range(first, len(_database()), step):
        op = _database()[number]
        for dtype in dtypes:
            if getattr(torch, dtype) in (op.dtypes if device == "cpu" else op.dtypesIfCUDA):
                print(json.dumps({"at": number, "op": op.name, "dtype": dtype}), flush=True)
                print(json.dumps(run_cell(op, dtype, device, samples)), flush=True)


def drive(number: int, args: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """One worker after another over a share of the ops, until all are done or time is up."""
    rows: list[dict[str, Any]] = []
    first = number
    while first < len(_database()) and time.monotonic() < deadline:
        command = [
            sys.executable,
            "-m",
            "dynamotor.tools.gpu_opinfo",
            "--worker",
            f"{first},{args.workers}",
            "--dtypes",
            args.dtypes,
            "--device",
            args.device,
            "--samples",
            str(args.samples),
        ]
        at: dict[str, Any] | None = None
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
            for line in worker.stdout or ():
                message = json.loads(line)
                if "at" in message:
                    at = message
                    first = message["at"]
                else:
                    rows.append(message)
                    at = None
                if time.monotonic() > deadline:
                    worker.kill()
                    return rows
        if at is None:
            return rows
        rows.append({"op": at["op"], "dtype": at["dtype"], "status": "error", "reason": "the worker died"})
        first += args.workers
    return rows


def main() -> int:
    """Run all workers and write the table; 1 when an op is wrong."""
    parser = argparse.ArgumentParser(prog="python -m dynamotor.tools.gpu_opinfo")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--json", default="gpu-opinfo.json")
    parser.add_argument("--worker", default="")
    args = parser.parse_args()
    if args.worker:
        first, step = map(int, args.worker.split(","))
        work(first, step, args.dtypes.split(","), args.device, args.samples)
        return 0
    deadline = time.monotonic() + args.seconds
    with ThreadPoolExecutor(args.workers) as pool:
        rows = [row for found in pool.map(lambda n: drive(n, args, deadline), range(args.workers)) for row in found]
    summary = {dtype: dict(Counter(r["status"] for r in rows if r["dtype"] == dtype)) for dtype in args.dtypes.split(",")}
    bad = [r for r in rows if r["status"] != "pass"]
    report = {
        "torch": torch.__version__,
        "device": args.device,
        "summary": summary,
        "not passed": bad,
        "left to aten": sorted({r["op"] for r in rows if r.get("fell_back")}),
    }
    Path(args.json).write_text(json.dumps(report, indent=1))
    print(json.dumps(summary), *(f"{r['status']}: {r['op']} {r['dtype']}: {r['reason']}" for r in bad), sep="\n")
    return int(any(r["status"] == "wrong" for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
