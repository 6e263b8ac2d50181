"""The data-parallel correctness matrix without pytest: on two GPUs with NCCL, or on a CPU with gloo. Writes
JSON as it goes.

    python tools/ddp_matrix.py matrix.json --device cuda --budget 130

Each row is a case of tests/distributed/ddp_cases.py: gradients against eager DDP, ranks bit-equal, the mode
it was compiled in. A row that hangs or dies costs itself only; what the budget does not reach is listed as
not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "distributed"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import ddp_cases
import ddp_failures
import torch
from ranks import Pair

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1}
ALSO_SPLIT = ("plain", "keywords", "tied", "buffers", "no_sync", "bf16", "two forwards")
ERRORS = ((ddp_failures.other_plan, "DM701"), (ddp_failures.without_gradient, "DM704"))


def jobs(only: list[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments of `compare`), the most telling ones first."""
    names = [name for name in ddp_cases.CASES if not only or name in only]
    yield from ((f"{name}: compiled around DDP", (name, "outside", "native")) for name in names)
    yield from (
        (f"{name}: {mode}", (name, "outside", "native", mode))
        for mode in ("split", "off")
        for name in names
        if name in ALSO_SPLIT
    )
    yield from ((f"{name}: compiled inside DDP", (name, "inside", "aot_eager")) for name in names)


def verdict(name: str, mode: str, results: list[dict[str, Any]]) -> str:
    """What is wrong with both ranks' results; "" when nothing is."""
    case = ddp_cases.CASES[name]
    expected = case.expect if mode == "auto" else mode
    for result in results:
        wrong = [key for key in ("gradients", "buffers") if not result[key] <= TOLERANCE[case.dtype]]
        if not result["same"]:
            wrong.append("ranks differ")
        if set(result["modes"]) != {expected}:
            wrong.append(f"compiled as {result['modes']}, expected {expected}")
        if expected == "ingraph" and not result["buckets"]:
            wrong.append("no bucket was reduced in a graph")
        if wrong:
            return ", ".join(wrong)
    return ""


class Runner:
    """Two processes that are started again after a row that killed them."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.pair: Pair | None = None

    def __call__(self, function: Any, *args: Any) -> list[Any]:
        if self.pair is None or not self.pair.alive:
            self.pair = Pair(group_timeout=self.seconds / 2, device=self.device)
        return self.pair.run(function, *args, seconds=self.seconds)

    def close(self) -> None:
        if self.pair is not None:
            self.pair.close()


def dies(timeout: float = 10.0) -> dict[str, Any]:
    """NCCL lets the device wait: the surviving rank says why within the timeout, and ends after it."""
    pair = Pair(group_timeout=timeout, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        for pipe in pair.pipes:
            pipe.send((ddp_failures.dies_while_the_device_waits, (folder,)))
        pair.processes[1].join(60)
        began, said, file = time.monotonic(), None, Path(folder, "said")
        while pair.processes[0].is_alive() and time.monotonic() - began < timeout + 60:
            time.sleep(0.1)
            if said is None and file.exists() and "DM703" in file.read_text(errors="replace"):
                said = time.monotonic() - began
        ended = time.monotonic() - began
        alive = pair.processes[0].is_alive()
        text = file.read_text(errors="replace") if file.exists() else ""
        pair.kill()
    line = next((line for line in text.splitlines() if "DM703" in line), text[-300:])
    told = f"said after {said:.1f} s" if said is not None else "nothing said"
    return {
        "ok": said is not None and said < timeout and "ddp_failures.py" in text and not alive,
        "note": f"{told}, {'still there' if alive else 'ended'} after {ended:.1f} s: {line[:300]}",
    }


def run_rows(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Fill `rows`, and write them after each."""
    end = time.monotonic() + options.budget
    run = Runner(options.device, 40.0 if options.device == "cuda" else 25.0)

    def row(label: str, work: Any) -> None:
        began = time.monotonic()
        try:
            found = work() if began < end else {"ok": None, "note": "not run: the time was up"}
        except Exception as error:  # the next row is still worth running
            found = {"ok": False, "note": f"{type(error).__name__}: {error}"[-1500:]}
        rows.append({"case": label, **found, "seconds": round(time.monotonic() - began, 1)})
        print(f"  {label}: {'ok' if found['ok'] else found['note']} {rows[-1]['seconds']} s", flush=True)
        Path(options.out).write_text(
            json.dumps({"torch": torch.__version__, "device": options.device, "rows": rows}, indent=1)
        )

    def compare(args: tuple[Any, ...]) -> dict[str, Any]:
        results = run(ddp_cases.compare, *args)
        note = verdict(args[0], args[3] if len(args) > 3 else "auto", results)
        return {
            "ok": not note,
            "note": note,
            "gradients": max(r["gradients"] for r in results),
            "modes": results[0]["modes"],
            "fallback": results[0]["fallback"],
        }

    def refuse(function: Any, code: str) -> dict[str, Any]:
        answers = run(function)
        return {"ok": answers == [code, code], "note": f"{answers}, expected {code}"}

    for label, args in jobs(options.cases.split(",") if options.cases else []):
        row(label, lambda args=args: compare(args))
    for function, code in ERRORS:
        row(
            f"{function.__name__}: {code} on both ranks",
            lambda function=function, code=code: refuse(function, code),
        )
    run.close()
    if options.device == "cuda":
        row("a rank dies in a backward: DM703 on the other one, which ends", dies)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--budget", type=float, default=130.0, help="seconds; no row begins later")
    parser.add_argument(
        "--cases", default="", help="names of tests/distributed/ddp_cases.py, comma-separated (all)"
    )
    rows: list[dict[str, Any]] = []
    run_rows(parser.parse_args(), rows)
    counts = {
        word: sum(r["ok"] is value for r in rows)
        for word, value in (("right", True), ("wrong", False), ("not run", None))
    }
    print("matrix: " + ", ".join(f"{n} {word}" for word, n in counts.items()), flush=True)
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
