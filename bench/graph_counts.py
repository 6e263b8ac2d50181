"""Graphs and breaks of programs and models as capture alone counts them, to compare versions of Python and PyTorch.

    python -m bench graph_counts --json py311.json [--parts behaviour,families,twelve]
    python -m bench graph_counts --compare py311.json py313.json py314.json

Programs are those of tests/behaviour, families those of families.txt, and the twelve models are small; models run
in inference and training, twice. A difference ends the comparison with status 1.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import dynamotor
from bench.tool import write_json
from dynamotor.base.events import counters

from . import families, models

TESTS = Path(__file__).parents[1] / "tests"
Counts = dict[str, list[int] | str]


def behaviour() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The programs of each table, each called twice."""
    sys.path.insert(0, str(TESTS))
    harness = importlib.import_module("behaviour.harness")
    for path in sorted((TESTS / "behaviour").glob("test_*.py")):
        theme = getattr(importlib.import_module(f"behaviour.{path.stem}"), "theme", None)
        for at in range(len(theme.cases) if theme else 0):
            yield f"{path.stem}[{at}]", lambda theme=theme, at=at: _twice(harness, theme.function(at, 1))


def _twice(harness: Any, function: Callable[..., Any]) -> None:
    compiled = dynamotor.compile(function, backend="eager")
    for time in range(2):
        harness.outcome(compiled, time)


def of_models(names: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Two calls, and two backwards of calls in training, of each model."""
    for name in names:
        case = models.load(name, small=True, dropout=False)
        for train in (False, True):
            yield f"{name}.{'train' if train else 'infer'}", lambda train=train, case=case: _run(case, train)


def _run(case: models.ModelCase, train: bool) -> None:
    compiled = dynamotor.compile(copy.deepcopy(case.model).train(train), backend="eager")
    for seed in range(2):
        args, kwargs = case.make_inputs(seed, train=train)
        with torch.set_grad_enabled(train):
            result = compiled(*args, **kwargs)
        if train:
            case.loss(result).backward()


PARTS: dict[str, Callable[[], Iterator[tuple[str, Callable[[], Any]]]]] = {
    "behaviour": behaviour,
    "families": lambda: of_models(models.names(families.LIST)),
    "twelve": lambda: of_models(list(models.TWELVE)),
}


def counted(run: Callable[[], Any]) -> list[int] | str:
    """[graphs, breaks] of a program's compilation; the class of an error that ends it."""
    dynamotor.reset()
    counters.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except Exception as error:
        return type(error).__name__
    return [counters["capture"]["graphs"], sum(counters["breaks"].values())]


def differences(files: list[str]) -> list[str]:
    """A line for each program that does not have the same graphs in every file."""
    found = {name: json.loads(Path(name).read_text())["counts"] for name in files}
    names = sorted({name for counts in found.values() for name in counts})
    graphs = {name: [_graphs(counts.get(name)) for counts in found.values()] for name in names}
    return [f"{name}: {each}" for name, each in graphs.items() if len(set(map(str, each))) > 1]


def _graphs(count: Any) -> Any:
    return count[0] if isinstance(count, list) else count


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--compare", nargs="+", help="files of earlier runs")
    options = parser.parse_args()
    if options.compare:
        lines = differences(options.compare)
        print("\n".join(lines) or "the same graphs in all files")
        return 1 if lines else 0
    torch.set_num_threads(1)
    counts: Counts = {}
    for part in options.parts.split(","):
        for name, run in PARTS[part]():
            counts[f"{part}/{name}"] = counted(run)
        graphs = [
            count[0] for name, count in counts.items() if name.startswith(part) and not isinstance(count, str)
        ]
        print(f"{part}: {len(graphs)} programs, {sum(graphs)} graphs", flush=True)
        found = {"python": platform.python_version(), "torch": torch.__version__, "counts": counts}
        write_json(options.json, found, indent=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
