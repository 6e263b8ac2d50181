"""`python -m dynamotor bench --shapes`: loops whose sizes change from call to call, beside eager and
torch.compile in one run.

Each (case, compiler) has a process and caches of its own. The loop runs in eager, then compiled from nothing,
each step's results compared (models: with the same loop in float64, and eager's too); `beyond` is what
compiling cost beyond eager's time, `second` the cost in another process that finds the caches (and `missed`
the programs that it had to compile). Then the loop runs again and again, in turns with eager: `again` is
eager's time over the compiled one's. For our compiler, `of special` is the speed at a few of the sizes beside
graphs that are compiled for each alone (`dynamic=False`).
With `--seconds 0` nothing is timed again: results are compared and compiles counted, which a loaded machine
may do, and with `--no-warm` there is no second process. `--merge EARLIER.json` measures only what has no row
there: the model list takes two hours (`--cases models --compilers dynamotor --seconds 0 --no-warm --merge
docs/results/cpu-shapes-models.json --json docs/results/cpu-shapes-models.json`).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.tool import write_json
from bench.turns import turns
from dynamotor.api import compile as compile_
from dynamotor.base.events import collect, counters
from dynamotor.tools.explain import is_op

from .shape_cases import CASES, Case, case_of, names_of

TOLERANCE = 2e-3  # of the largest element; sums in other orders
SPECIALS = 3  # sizes that are compared with graphs of their own
COLUMNS = (
    "case",
    "compiler",
    "calls",
    "eager s",
    "loop s",
    "beyond s",
    "second s",
    "missed",
    "compiles",
    "again",
    "of special",
    "error",
    "eager's",
)
BARS = {
    **dict.fromkeys(("bert-infer", "bert-train", "decode-gpt2", "decode-llama", "decode-long"), 12),
    **dict.fromkeys(("resnet", "u-net", "last-batch", "packed", "function"), 8),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench --shapes`."""
    parser.add_argument("--shapes", action="store_true", help="loops whose sizes change from call to call")
    parser.add_argument(
        "--cases",
        default="",
        help=f"with --shapes: of {', '.join(CASES)}, model:NAME[:train], models "
        "(the model list), comma-separated (default: all but the models)",
    )


# One measurement, in a process of its own -------------------------------------------------------------------
def measured(name: str, compiler: str, seconds: float, device: str) -> dict[str, Any]:
    """The row of a case and a compiler ("ours" or "torch.compile")."""
    torch.manual_seed(0)
    with torch.device(device):
        case = case_of(name)
    if isinstance(case.model, torch.nn.Module):
        case.model.to(device)
    wanted = _copies(case.steps(case.model))  # warms eager up
    finish = torch.cuda.synchronize if device.startswith("cuda") else _nothing
    start = time.perf_counter()
    _drain(case, case.model)
    finish()
    eager_s = time.perf_counter() - start
    call = compile_(case.model) if compiler == "ours" else torch.compile(case.model)
    start = time.perf_counter()
    with collect("recompile") as events:
        got = _copies(case.steps(call))
    finish()
    loop_s = time.perf_counter() - start
    compiles = counters["frames"]["captured"] if compiler == "ours" else _dynamo_compiles()
    exact = wanted
    with contextlib.suppress(RuntimeError):  # products of experts take no float64
        exact = wanted if case.exact is None else case.exact()
    error, eagers = (max(_error(w, g) for w, g in zip(exact, each, strict=True)) for each in (got, wanted))
    row = {
        "case": name,
        "compiler": compiler,
        "calls": len(wanted),
        "eager_s": eager_s,
        "loop_s": loop_s,
        "beyond_s": loop_s - eager_s,
        "compiles": compiles,
        "missed": counters["cache"]["program.miss"] + counters["cache"]["program.not_kept"],
        "error": error,
        "eager_error": eagers,
    }
    if compiler == "ours":
        row["left_to_eager"] = {k: n for k, n in counters["fallback"].items() if not is_op(k)}
        row["aten_calls"] = {k: n for k, n in counters["fallback"].items() if is_op(k)}
        row["specialised_by"] = dict(counters["specialised"])
        row["parts"], row["breaks"] = counters["frames"]["parts compiled"], sum(counters["breaks"].values())
        row["recompiles"] = [
            [re.sub(r"\S*/site-packages/", "", reason) for reason in event.data["reasons"]]
            for event in events
        ]
        row |= _beyond_two(row["recompiles"])
    if not seconds:
        return row
    rounds = turns(
        {"eager": lambda: _drain(case, case.model), "again": lambda: _drain(case, call)},
        seconds=seconds,
        finish=finish,
        least=3,
        turn=0.0,
    )
    row["again"] = statistics.median(r["eager"] / r["again"] for r in rounds)
    row["eager_again_s"], row["again_s"] = (
        statistics.median(r[k] for r in rounds) for k in ("eager", "again")
    )
    if compiler == "ours" and case.single is not None:
        row["of_special"] = _of_special(case, call, seconds, finish)
    return row


def _beyond_two(recompiles: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The most programs that one graph has, and for a third and later ones why a program before, a general
    one if that is known, did not serve.
    """
    third = [reasons for reasons in recompiles if len(reasons) > 1]
    lines = [next((r for r in reasons if " asked at " in r), reasons[0]) for reasons in third]
    return {
        "programs_of_a_graph": 1 + max(map(len, recompiles), default=0),
        "why_more_than_two": list(dict.fromkeys(lines)),
    }


def _of_special(case: Case, call: Any, seconds: float, finish: Callable[[], object]) -> list[float]:
    """The general graph's speed of the special one's, at sizes spread over the loop."""
    assert case.single is not None
    found = []
    for n in range(1, case.count, max(1, case.count // SPECIALS)):
        step = case.single(n)
        special = compile_(case.model, dynamic=False)
        step(special)
        rounds = turns(
            {"special": lambda: step(special), "general": lambda: step(call)},  # noqa: B023
            seconds=seconds / SPECIALS,
            finish=finish,
            turn=0.01,
        )
        found.append(statistics.median(r["special"] / r["general"] for r in rounds))
    return found


def _copies(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [copy.deepcopy(one.detach()) for one in results]


def _drain(case: Case, call: Any) -> None:
    for _ in case.steps(call):
        pass


def _nothing() -> None:
    """A CPU has finished when the call returns."""


def _error(want: torch.Tensor, got: torch.Tensor) -> float:
    if want.shape != got.shape:
        return float("inf")
    return float((want - got).abs().max().double() / want.abs().max().clamp(min=1e-12))


def _dynamo_compiles() -> int:
    return sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"]


# The bench --------------------------------------------------------------------------------------------------
def _row(name: str, compiler: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row from a fresh process with fresh caches."""
    with tempfile.TemporaryDirectory(prefix="dynamotor-bench-") as cache:
        env = {
            **os.environ,
            "DYNAMOTOR_CACHE_DIR": f"{cache}/dynamotor",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        }
        row: dict[str, Any] = {"case": name, "compiler": compiler}
        for second, seconds in ((False, args.seconds), (True, 0.0))[: 1 if args.no_warm else 2]:
            command = [sys.executable, "-m", __spec__.name, name, compiler, str(seconds), args.device]
            try:
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.timeout)
            except subprocess.TimeoutExpired:
                return {**row, "failed": f"no result within {args.timeout:.0f} s"}
            lines = done.stdout.strip().splitlines()
            if done.returncode or not lines:
                tail = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                return {**row, "failed": tail}
            found = json.loads(lines[-1])
            if not second:
                row = found
        worse = max(row["error"], found["error"])
    if args.no_warm:
        return row
    return {**row, "error": worse, "second_s": found["beyond_s"], "missed": found["missed"]}


def _cells(row: dict[str, Any]) -> list[str]:
    if "failed" in row:
        return [row["case"], row["compiler"], row["failed"][:100]]
    special = " ".join(f"{x:.2f}" for x in row.get("of_special", ())) or "-"
    return [
        row["case"],
        row["compiler"],
        str(row["calls"]),
        f"{row['eager_s']:.2f}",
        f"{row['loop_s']:.2f}",
        f"{row['beyond_s']:.2f}",
        f"{row['second_s']:.2f}" if "second_s" in row else "-",
        str(row["missed"]),
        str(row["compiles"]),
        f"{row['again']:.2f}" if "again" in row else "-",
        special,
        f"{row['error']:.0e}",
        f"{row['eager_error']:.0e}",
    ]


def main(args: argparse.Namespace) -> int:
    """Run the cases; 0 when every result was right."""
    names = names_of(args.cases)
    compilers = [
        {"dynamotor": "ours", "inductor": "torch.compile"}.get(c, c) for c in args.compilers.split(",")
    ]
    rows: list[dict[str, Any]] = [
        row
        for path in args.merge
        for row in json.loads(Path(path).read_text())["rows"]
        if "failed" not in row
    ]
    there = {(row["case"], row["compiler"]) for row in rows}
    print("  ".join(COLUMNS))
    for name in names:
        for compiler in compilers:
            if compiler != "eager" and (name, compiler) not in there:  # every row has eager beside it
                rows.append(_row(name, compiler, args))
                print("  ".join(_cells(rows[-1])), flush=True)
                _write(rows, args.json)
    for name, ratio in _beside(rows).items():
        print(
            f"{name}: {ratio:.1f} times less beyond eager's time than torch.compile (bar: {BARS.get(name, 'none')})"
        )
    return int(any("failed" in row or not _right(row) for row in rows))


def _right(row: dict[str, Any]) -> bool:
    """Small, or no larger than twice what eager's own rounding does."""
    return row["error"] <= max(TOLERANCE, 2 * row["eager_error"])


def _write(rows: Sequence[dict[str, Any]], path: str | None) -> None:
    """The figures so far: torch.compile takes minutes."""
    result = {
        "command": " ".join(sys.argv[1:]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "rows": rows,
        "beyond_of_ours": _beside(rows),
    }
    write_json(path, result)


def _beside(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """torch.compile's time beyond eager's over ours, by case."""
    beyond = {(r["case"], r["compiler"]): r["beyond_s"] for r in rows if "failed" not in r}
    return {
        case: beyond[case, "torch.compile"] / max(beyond[case, "ours"], 1e-3)
        for case, compiler in beyond
        if compiler == "ours" and (case, "torch.compile") in beyond
    }


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])))
