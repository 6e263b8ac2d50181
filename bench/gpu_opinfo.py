"""PyTorch's operator database through the compiler on a GPU: each op is right, left to aten, or wrong.

>>> python -m bench.gpu_opinfo --dtypes float32,bfloat16 --samples 3 --json docs/results/h200-gpu-opinfo.json

Worker processes take op after op, so that one that dies (a failed assertion ends a CUDA context) or hangs
costs one cell. A run that `--budget` ends goes on where it stopped with `--merge EARLIER.json`. `--device
cpu` runs the kernels in Triton's interpreter (set TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from bench.tool import write_json
from dynamotor.api import compile as compile_, reset
from dynamotor.base.config import config
from dynamotor.base.events import collect, counters

from .json_worker import JsonWorker

TOLERANCE = {
    "float64": (1e-7, 1e-7),
    "float32": (1e-4, 1e-4),
    "bfloat16": (2e-2, 2e-2),
    "float16": (5e-3, 5e-3),
}
# Ops whose results are random or uninitialised: compared by shape and dtype.
UNCERTAIN = re.compile(
    "rand|bernoulli|multinomial|normal|dropout|empty|rrelu|uniform|cauchy|exponential|geometric|svd|pca|"
    "resize_|fractional|eig|qr|lu_|householder|ldl"
)
# Ops of whose results only the first few mean something: behind attention and its logsumexp come the random
# generator's seed and offset, which stay uninitialised memory when there is no dropout.
MEANINGFUL = {"torch.ops.aten._efficient_attention_forward": 2, "torch.ops.aten._flash_attention_forward": 2}
Cell = dict[str, Any]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def in_double(op: Any, sample: Any) -> list[torch.Tensor]:
    """Eager's results for the same inputs in float64."""

    def up(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    torch.manual_seed(0)
    return tensors(op.op(*tree_map(up, (sample.input, *sample.args)), **tree_map(up, sample.kwargs)))


def assert_right(
    got: torch.Tensor, want: torch.Tensor, exact: Callable[[], torch.Tensor], rtol: float, atol: float
) -> None:
    """Close to eager; another element must be no farther from float64 than eager's, which may be
    rough, but not wild.
    """
    try:
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError:
        if not want.is_floating_point():
            raise
        truth = exact().double()
        better = (got.double() - truth).abs() <= (want.double() - truth).abs()
        better &= torch.isclose(want.double(), truth, rtol=10 * rtol, atol=10 * atol)
        if not bool((better | torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)).all()):
            raise


def run_sample(op: Any, sample: Any, dtype: str, target: str) -> Counter[str]:
    """One sample against eager; its times. AssertionError when it is wrong."""
    torch.manual_seed(0)
    want = tensors(op.op(sample.input, *sample.args, **sample.kwargs))
    counters.clear()
    with config.patch(target=target), collect("kernel") as kernels:
        call = compile_(lambda x, args, kwargs: op.op(x, *args, **kwargs))
        torch.manual_seed(0)
        got = tensors(call(sample.input, sample.args, sample.kwargs))
    rtol, atol = TOLERANCE.get(dtype, (0, 0))
    assert len(got) == len(want), f"{len(got)} results, eager gives {len(want)}"
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, (
            f"{a.dtype}{list(a.shape)}, eager gives {b.dtype}{list(b.shape)}"
        )
        if not UNCERTAIN.search(op.name) and n < MEANINGFUL.get(op.name, len(want)):
            assert_right(a, b, lambda n=n: in_double(op, sample)[n], rtol, atol)
    return Counter(
        kernels=len(kernels),
        fell_back=sum(counters["fallback"].values()),
        breaks=sum(counters["breaks"].values()),
    )


def run_cell(op: Any, dtype: str, device: str, samples: int) -> Cell:
    """All samples of an op in a dtype."""
    cell: Cell = {"op": label(op), "dtype": dtype}
    target = "triton" if device == "cpu" else ""
    total: Counter[str] = Counter()
    try:
        given = list(
            itertools.islice(op.sample_inputs(device, getattr(torch, dtype), requires_grad=False), samples)
        )
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
    finally:
        reset()
    return {
        **cell,
        "status": "pass",
        **{key: total[key] for key in ("kernels", "fell_back", "breaks") if total[key]},
    }


def label(op: Any) -> str:
    """An op's name with its variant."""
    return f"{op.name} {op.variant_test_name}".strip()


def _database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def work(args: argparse.Namespace) -> None:
    """A worker: reads "number dtype" lines, answers each with its cell."""
    database = _database()
    print(json.dumps({"ready": 1}), flush=True)
    for line in sys.stdin:
        number, dtype = line.split()
        print(json.dumps(run_cell(database[int(number)], dtype, args.device, args.samples)), flush=True)


class Driver:
    """Cells that are to be run, threads that each keep a worker, and the rows so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.deadline = args, time.monotonic() + args.budget
        self.rows: dict[str, Cell] = {}
        for path in args.merge:
            if Path(path).exists():
                self.rows |= json.loads(Path(path).read_text())["rows"]
        self.left: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        for number, op in enumerate(_database()):
            for dtype in args.dtypes.split(","):
                known = getattr(torch, dtype) in (op.dtypes if args.device == "cpu" else op.dtypesIfCUDA)
                if known and f"{label(op)} {dtype}" not in self.rows and re.search(args.ops, op.name):
                    self.left.put((f"{number} {dtype}", label(op)))

    def _start(self) -> JsonWorker:
        command = [sys.executable, "-m", "bench.gpu_opinfo", "--worker"]
        return JsonWorker([*command, "--device", self.args.device, "--samples", str(self.args.samples)])

    def drive(self) -> None:
        """One worker after another, until nothing is left or time is up."""
        worker: JsonWorker | None = None
        while time.monotonic() < self.deadline:
            try:
                line, op = self.left.get_nowait()
            except queue.Empty:
                break
            if worker is None:
                worker = self._start()
                worker.next(self.deadline)
            worker.send(line)
            cell = worker.next(min(self.deadline, time.monotonic() + self.args.patience))
            if cell is None:
                self._kill(worker, line, op)
                worker = None
            else:
                self.rows[f"{cell['op']} {cell['dtype']}"] = cell
        if worker is not None:
            worker.end()

    def _kill(self, worker: JsonWorker, line: str, op: str) -> None:
        """A worker that died or hangs: its cell is an error, unless time is up for all."""
        died = worker.process.poll() is not None
        tail = worker.end(0.0)
        if died or time.monotonic() < self.deadline:
            dtype = line.split()[1]
            reason = (
                f"the worker died: {tail[-200:]}" if died else f"no answer within {self.args.patience:.0f} s"
            )
            self.rows[f"{op} {dtype}"] = {"op": op, "dtype": dtype, "status": "error", "reason": reason}

    def report(self) -> dict[str, Any]:
        """The rows, how many passed, and what did not."""
        rows = [self.rows[key] for key in sorted(self.rows)]
        dtypes = sorted({r["dtype"] for r in rows})
        summary = {d: dict(Counter(r["status"] for r in rows if r["dtype"] == d)) for d in dtypes}
        rates = {d: round(counts.get("pass", 0) / sum(counts.values()), 4) for d, counts in summary.items()}
        device = (
            torch.cuda.get_device_name()
            if self.args.device == "cuda" and torch.cuda.is_available()
            else self.args.device
        )
        return {
            "torch": torch.__version__,
            "device": device,
            "samples": self.args.samples,
            "summary": summary,
            "pass rate": rates,
            "not run": self.left.qsize(),
            "not passed": [r for r in rows if r["status"] != "pass"],
            "left to aten": sorted({r["op"] for r in rows if r.get("fell_back")}),
            "rows": dict(sorted(self.rows.items())),
        }


def main() -> int:
    """Run all workers and write the table; 1 when an op is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_opinfo")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--ops", default="", help="a regular expression of names")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument(
        "--budget", type=float, default=480.0, help="seconds after which nothing new is started"
    )
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that one cell may take")
    parser.add_argument(
        "--merge", action="append", default=[], help="an earlier report: its rows are not run again"
    )
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU in this machine: nothing is run")
        return 0
    driver = Driver(args)
    with ThreadPoolExecutor(args.workers) as pool:
        for running in [pool.submit(driver.drive) for _ in range(args.workers)]:
            running.result()
    report = driver.report()
    write_json(args.json, report)
    for row in report["not passed"]:
        print(f"{row['status']}: {row['op']} {row['dtype']}: {row['reason']}")
    print(f"{report['summary']}, pass rate {report['pass rate']}, {report['not run']} cells not run")
    return int(any(row["status"] == "wrong" for row in report["not passed"]))


if __name__ == "__main__":
    raise SystemExit(main())
