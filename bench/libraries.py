"""The cases of library_cases.py beside eager in float64 and torch.compile's counts of graphs; writes the
page.

python -m bench libraries --json docs/results/libraries.json [--names kornia,peft] [--page docs/libraries.md]

With --page the page is made of the files of docs/results alone, libraries.json and families.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.tool import read_json, write_json

from . import dynamo_tests, quantised, torchvision_stub
from .beside import Row, add_shares, in_child, measure, printed, table
from .families import PHASES, REASONS as FAMILY_REASONS
from .library_cases import CASES

RESULTS = Path(__file__).parents[1] / "docs" / "results"
ABOUT = """# Libraries

What programs of other people's libraries give under `dynamotor.compile`, beside eager and beside `torch.compile`. "Right": outputs,
gradients and the state after a few steps are as near to eager in float64 as eager in float32 is, within a factor of four (to
eager in float32, up to rounding, where a library is not written for float64). The error is that of the tensor which is furthest beyond
eager's, with eager's own in brackets. Graphs and breaks are counted over the whole program, recompilations included; those
of `torch.compile` with its backend "eager".

"Compiled share": of the aten calls that the compiled functions and modules of a program make in eager, the part that is not left to eager;
counted with PyTorch's profiler in the same way for both compilers, whose graphs one backend runs op by op (`bench/share.py`). Calls outside of
compiled functions (losses, data loaders, optimizers and solvers that the program does not compile) and calls of the backward count for neither. The
share of `torch.compile` is in brackets; rows below 98 % name the calls that run outside, and the reason.

`make test-libraries` installs the packages into an environment of its own and runs the cases as tests;
`python -m bench libraries --json docs/results/libraries.json` and `python -m bench families --json docs/results/families.json`
wrote the figures, `python -m bench libraries --page docs/libraries.md` this page.
"""


def one(name: str) -> Row:
    """A case, measured."""
    return measure(name, CASES[name].run, exact=CASES[name].exact)


def with_shares(known: dict[str, Any], name: str) -> Row:
    """The row that is there, with the shares of now."""
    return add_shares(Row(**known), CASES[name].run)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many are right, and how many take more graphs than with torch.compile."""
    right = sum(row["right"] for row in rows)
    theirs = [row for row in rows if row["torch_graphs"] is not None]
    more, fewer = (
        sum(more_graphs(r) for r in theirs),
        sum(r["graphs"] < r["torch_graphs"] for r in theirs if r["right"]),
    )
    single = sum(row["graphs"] == 1 for row in rows)
    return f"{right} of {len(rows)} right; {single} in one graph; more graphs than `torch.compile` in {more}, fewer in {fewer}."


def more_graphs(row: dict[str, Any]) -> bool:
    """Whether a program took more graphs here."""
    return row["torch_graphs"] is not None and row["graphs"] > row["torch_graphs"]


def page() -> str:
    """docs/libraries.md, from the committed figures."""
    rows = list(read("libraries.json").values())
    lines = [
        ABOUT,
        f"{len(rows)} of the {len(CASES)} cases have been measured so far.",
        summary(rows),
        "",
        table(rows, {name: case.reason for name, case in CASES.items()}),
        "",
    ]
    lines += ["## Families of transformers", ""]
    lines += [
        "Small configurations with random weights (`bench/family_configs.py`, `bench/model_configs.py`)."
    ]
    names = {"infer": "Inference", "train": "Training, two steps", "generate": "generate, four tokens"}
    found = read("families.json")
    for phase in PHASES:
        rows = list(found.get(phase, {}).values())
        lines += ["", f"### {names[phase]}", "", summary(rows), "", table(rows, FAMILY_REASONS)]
    if quantised_weights := read("cpu-quantised.json"):
        lines += ["", *quantised.section(quantised_weights)]
    if tests := read("dynamo-tests.json"):
        lines += ["", *dynamo_tests.section(tests)]
    return "\n".join(lines) + "\n"


def read(name: str) -> dict[str, Any]:
    """A file of docs/results, empty where it is absent."""
    return read_json(RESULTS / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the figures; an earlier run's are kept")
    parser.add_argument("--names", default="", help="parts of names, comma-separated")
    parser.add_argument("--timeout", type=float, default=150.0)
    parser.add_argument(
        "--shares", action="store_true", help="only the compiled share of rows that are there"
    )
    parser.add_argument("--page", default="", help="only write this page")
    options = parser.parse_args()
    if options.page:
        Path(options.page).write_text(page())
        return
    torch.set_num_threads(1)
    torchvision_stub.prepare()
    found = read_json(options.json)
    for name in CASES:
        if any(part in name for part in options.names.split(",")):
            work = partial(with_shares, found[name]) if options.shares and name in found else one
            row = in_child(name, partial(work, name), options.timeout)
            if work is not one and row.share is None:
                print(f"{name}: not measured, the row stays as it is: {row.error}", flush=True)
                continue
            found[name] = asdict(row)
            print(printed(row), flush=True)
            write_json(options.json, {n: found[n] for n in CASES if n in found})


if __name__ == "__main__":
    main()
