"""The command line: `python -m fuzz fusion --seconds 60 --seed 3 --jobs 2 --json out.json`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from . import fuzzers, report, trial, workers

NAMES = tuple(fuzzers.FUZZERS)


def main() -> int:
    """Run a fuzzer, or all of them one after another; 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("fuzzer", nargs="?", default="all", choices=[*NAMES, "all", "worker"])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1 << 60, help="programs at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--targets", default=",".join(trial.targets()))
    parser.add_argument("--patience", type=float, default=100.0, help="seconds for a chunk with findings")
    parser.add_argument("--json", default="", help="where the counts and findings are written")
    args = parser.parse_args()
    if not 0 <= args.seed < 2**40:
        parser.error("a seed is below 2**40: seeds of programs, which are multiples, are numbers of 64 bits")
    if args.fuzzer == "worker":
        workers.work()
        return 0
    names = NAMES if args.fuzzer == "all" else (args.fuzzer,)
    reports = {name: _run(name, args, args.seconds / len(names)) for name in names}
    if args.json:
        Path(args.json).write_text(json.dumps(reports, indent=1) + "\n")
    return int(any(one["findings"] for one in reports.values()))


def _run(name: str, args: argparse.Namespace, seconds: float) -> dict[str, object]:
    pool = workers.Workers(args.jobs, seconds, lambda text: print(text, flush=True), args.patience)
    found = pool.run(fuzzers.chunks(name, args.seed, args.count, args.targets.split(",")))
    total = sum(found.tally.values())
    print(
        f"{name}: {total} programs in {found.seconds:.0f} s, "
        f"{total / max(found.seconds, 1e-9):.1f} a second; {dict(found.tally)}"
    )
    print(f"not compiled, by reason: {dict(found.refused.most_common())}")
    if found.findings:
        print(f"{len(found.findings)} kinds of findings; header of the tests above:\n{report.HEADER}")
    return {
        "command": " ".join(["python -m fuzz", *sys.argv[1:]]),
        "seed": args.seed,
        "seconds": round(found.seconds),
        "tally": found.tally,
        "refused": dict(found.refused.most_common()),
        "findings": list(found.findings.values()),
    }


if __name__ == "__main__":
    raise SystemExit(main())
