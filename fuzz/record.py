"""Puts what `--json` wrote into the repository's results: `python -m fuzz.record out.json ... --machine "..."`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "fuzz.json"
ATEN = "aten "


def row(fuzzer: str, report: dict[str, Any], machine: str) -> dict[str, Any]:
    """One run as the results hold it: counts, why something was not compiled, each kind of finding."""
    refused = report["refused"]
    return {
        "fuzzer": fuzzer,
        "command": report["command"].partition(" --json")[0],
        "seed": report["seed"],
        **({"machine": machine} if machine else {}),
        "seconds": report["seconds"],
        "total": sum(report["tally"].values()),
        "tally": dict(sorted(report["tally"].items())),
        "not compiled, by reason": {why: n for why, n in refused.items() if not why.startswith(ATEN)},
        "left to aten": sorted(why.removeprefix(ATEN) for why in refused if why.startswith(ATEN)),
        "findings": [
            {"where": one["name"], "problem": one["problems"][0], "times": one["times"]}
            for one in report["findings"]
        ],
    }


def main() -> None:
    """Append the runs that are not there yet, and count all anew."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.record")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--machine", default="", help="the machine that they ran on, if it is another than the file's"
    )
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    known = {(run["command"], run.get("machine")) for run in results["runs"]}
    for file in args.files:
        for fuzzer, report in json.loads(file.read_text()).items():
            new = row(fuzzer, report, args.machine)
            if (new["command"], new.get("machine")) not in known:
                results["runs"].append(new)
    totals: Counter[str] = Counter()
    for run in results["runs"]:
        totals[run["fuzzer"]] += run["total"]
    RESULTS.write_text(json.dumps({**results, "totals": dict(totals)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
