"""Cost of guards and of the cold first call under several Pythons, in turns on one machine.

    python -m bench version_cost --pythons .venv/bin/python other/bin/python --rounds 5 [--json FILE]

Each round starts a process under each Python, with an empty cache. Guards: microseconds of one check of all guards of
a small BERT, the best of many turns. Call: microseconds of a whole call of that model with its graph left out.
Cold: seconds of the first call of each model less an eager call, by the clock and of the process's own processors
(less what g++ takes). Ratios are to the first Python.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch

from bench.tool import write_json
from dynamotor.tools.tables import render

MODELS = (("BertForMaskedLM", "train"), ("resnet18", "infer"))


def best(call: Callable[[], object], turns: int = 60, each: int = 200) -> float:
    """Seconds of one call in the best turn."""
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        for _ in range(each):
            call()
        times.append((time.perf_counter() - start) / each)
    return min(times)


def guards() -> dict[str, float]:
    """The cost of the guards of a small model, and of a call that has nothing else to do."""
    import dynamotor
    from dynamotor import _C

    from . import models

    def without_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        outputs = tuple(graph(*inputs))
        return lambda *_: outputs

    case = models.load("BertForMaskedLM", small=True, dropout=False)
    model = case.model.eval()
    _, inputs = case.make_inputs()
    compiled = dynamotor.compile(model, backend=without_graph)
    with torch.no_grad():
        compiled(**inputs)
        compiled(**inputs)
        (entry,) = [
            entry
            for found in gc.get_objects()
            if type(found) is _C.Dispatcher
            for entry in found.entries
            if entry.hits
        ]
        arguments = (model, *[inputs[name] for name in entry.kwnames])[1 - entry.n_positional :]
        if entry.program.check(arguments) is None:
            raise AssertionError("the guards do not hold")
        return {
            "guards us": 1e6 * best(lambda: entry.program.check(arguments)),
            "call us": 1e6 * best(lambda: compiled(**inputs)),
        }


def first_call(model: str, phase: str) -> dict[str, float]:
    """The first call of a model less an eager call."""
    from .worker import start_task

    job = {
        "model": model,
        "phase": phase,
        "compiler": "dynamotor",
        "device": "cpu",
        "amp": "none",
        "batch": None,
        "small": True,
    }
    result = start_task(job)
    wall, processors = (a - b for a, b in zip(result["first"], result["eager"], strict=True))
    return {f"{model} {phase} s": wall, f"{model} {phase} cpu s": processors}


def worker() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = guards()
    for model, phase in MODELS:
        found |= first_call(model, phase)
    print(json.dumps({"python": platform.python_version()} | found))


def one_round(python: str) -> dict[str, float | str]:
    """What one process under a Python measures."""
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"DYNAMOTOR_CACHE_DIR": cache}
        command = [python, "-m", "bench.version_cost", "--worker"]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pythons", nargs="+", default=[sys.executable])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    rounds = [{python: one_round(python) for python in options.pythons} for _ in range(options.rounds)]
    names = [name for name in rounds[0][options.pythons[0]] if name != "python"]
    rows = []
    for python in options.pythons:
        found = {name: median(each[python][name] for each in rounds) for name in names}  # type: ignore[type-var]
        ratio = {
            name: median(each[python][name] / each[options.pythons[0]][name] for each in rounds)  # type: ignore[operator]
            for name in names
        }
        rows.append({"python": rounds[0][python]["python"], "medians": found, "ratios": ratio})
    shown = [
        [name, *(f"{row['medians'][name]:.3g} ({row['ratios'][name]:.2f}x)" for row in rows)]  # type: ignore[index]
        for name in names
    ]
    print(render(shown, ("", *(str(row["python"]) for row in rows))))
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
