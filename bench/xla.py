"""`python -m dynamotor bench --xla`: the lazy device, both bridges and jax itself run the same programs, in
turns, in one process.

Columns of a row: the median milliseconds of each way, and the median of the ratios lazy / way with its
quartiles. `jax` calls the bridge's own executable through jax (`jax.stages.Compiled`), `jit` calls `jax.jit`
of the same program; training also runs `compile_step`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import torch

from bench.tool import write_json
from bench.turns import geometric_mean
from dynamotor.api import compile as dynamotor_compile, reset
from dynamotor.base.events import collect
from dynamotor.xla import execute, metrics, rng, transfer
from dynamotor.xla.device import platform as platform_name
from dynamotor.xla.step import compile_optimizer, compile_step
from dynamotor.xla.sync import sync

from .measure import once, quartiles
from .xla_models import SEED, SMALL, Case, cases

Way = Callable[[], Any]
ABOUT = (
    "torch",
    "jax",
    "python",
    "device",
    "threads",
    "xla_flags",
    "float32_matmul_precision",
)  # the machine and its settings


def names_of(text: str) -> list[Case]:
    """The cases that `--models` names: "small" (two transformers), "seed" (ten models), or names."""
    groups = {"small": SMALL, "seed": SEED}
    return [case for word in text.split(",") if word for case in (groups.get(word) or [cases[word]])]


def inference(case: Case, small: bool) -> tuple[dict[str, Way], dict[str, Any]]:
    """The ways to run a model's forward, each waiting for its result, and the checks made."""
    model, inputs = case.make(small, "infer")
    with torch.no_grad():
        expected = model(*inputs)
    model, inputs = model.to("xla"), tuple(t.to("xla") for t in inputs)

    def run(function: Callable, synchronise: bool) -> torch.Tensor:
        with torch.no_grad():
            result = function(*inputs)
        if synchronise:
            sync()
        transfer.data_of(result).block_until_ready()
        return result

    with collect("xla.program") as programs:
        fast = dynamotor_compile(model, backend="xla")
        once_result = run(fast, synchronise=False)
    every = dynamotor_compile(model, backend="xla_trace_everytime")
    lazy_result = run(model, synchronise=True)
    checks = {
        "error": _error(once_result, expected),
        "bits_equal_lazy": torch.equal(once_result.cpu(), lazy_result.cpu()),
        "executables": len(programs),
        "fallbacks": _fallbacks(),
    }
    ways = {
        "lazy": lambda: run(model, True),
        "trace_everytime": lambda: run(every, False),
        "trace_once": lambda: run(fast, False),
    }
    if len(programs) == 1:
        ways |= _through_jax(programs[0].data["program"], programs[0].data["inputs"])
    return ways, checks


def _through_jax(program: Any, inputs: tuple) -> dict[str, Way]:
    """The same program called by jax's own means on the same arrays."""
    arrays = program.gather(inputs)
    if program.draws is not None:
        arrays.append(jax.device_put(program.draws.take(program.device)))
    compiled, jitted = program.executable.compiled, jax.jit(execute.to_function(program.graph))
    return {
        "jax": lambda: jax.block_until_ready(compiled(*arrays)),
        "jit": lambda: jax.block_until_ready(jitted(*arrays)),
    }


def training(case: Case, small: bool) -> tuple[dict[str, Way], dict[str, Any]]:
    """The ways to run a training step (SGD with momentum), each waiting for the parameters."""
    model, inputs = case.make(small, "train")
    ways: dict[str, Way] = {}
    losses: dict[str, list[float]] = {}
    for name in ("lazy", "trace_everytime", "trace_once", "compile_step"):
        ways[name] = _training_way(name, copy.deepcopy(model).to("xla"), tuple(t.to("xla") for t in inputs))
        rng.set_state(0)
        losses[name] = [float(ways[name]()) for _ in range(3)]
    errors = {
        name: max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(losses["lazy"], values))
        for name, values in losses.items()
    }
    return ways, {"loss_error": errors, "fallbacks": _fallbacks()}


def _wait(tensors: list[torch.Tensor]) -> None:
    jax.block_until_ready([transfer.data_of(t) for t in tensors])


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean()


def _training_way(name: str, model: torch.nn.Module, inputs: tuple) -> Way:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if name == "compile_step":
        step = compile_step(model, _loss, optimizer, n_inputs=len(inputs))

        def run() -> torch.Tensor:
            loss = step(*inputs)
            _wait([loss, *model.parameters()])
            return loss

        return run
    backend = {"trace_once": "xla", "trace_everytime": "xla_trace_everytime"}.get(name)
    function = model if backend is None else dynamotor_compile(model, backend=backend)
    update = compile_optimizer(optimizer) if name == "trace_once" else optimizer.step

    def run_step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(function(*inputs))
        loss.backward()
        update()
        sync()
        _wait([loss, *model.parameters()])
        return loss.detach()

    return run_step


def _error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    return float(
        (result.cpu().float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-6)
    )


def _fallbacks() -> dict[str, int]:
    return {name: n for name, n in metrics.all_counters().items() if name.startswith("aten::")}


def rounds(ways: dict[str, Way], seconds: float) -> dict[str, dict[str, float]]:
    """Run all ways in turns for about `seconds`, after warm-up: medians in ms, and the ratios to lazy of each
    round.

    A way runs for a tenth of a second in its turn, as it does in a program, where nothing else fills the
    processor's caches.
    """
    for way in ways.values():
        for _ in range(3):
            way()
    repeat = {name: max(1, int(0.1 / max(once(way), 1e-7))) for name, way in ways.items()}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples["lazy"]) < 7:
        order = list(ways) if len(samples["lazy"]) % 2 == 0 else list(ways)[::-1]
        for name in order:
            samples[name].append(once(ways[name], repeat[name]))
    table = {}
    for name, times in samples.items():
        low, mid, high = quartiles([a / b for a, b in zip(samples["lazy"], times)])
        table[name] = {
            "ms": statistics.median(times) * 1e3,
            "over_lazy": mid,
            "low": low,
            "high": high,
            "rounds": len(times),
        }
    if "jax" in samples:
        extra = [(a - b) * 1e6 for a, b in zip(samples["trace_once"], samples["jax"])]
        table["trace_once"]["us_over_jax"] = statistics.median(extra)
    return table


def measure(case: Case, phase: str, small: bool, seconds: float) -> dict[str, Any]:
    """One row of the result."""
    reset()
    metrics.clear()
    gc.collect()
    ways, checks = inference(case, small) if phase == "infer" else training(case, small)
    return {
        "model": case.name,
        "phase": phase,
        "batch": case.batch if phase == "infer" else case.train_batch,
        **checks,
        "ways": rounds(ways, seconds),
    }


def main(args: argparse.Namespace) -> int:
    """Run the bench; 0 when every row was measured. The result is written after each row: one that dies loses
    no other.
    """
    earlier = [json.loads(Path(name).read_text()) for name in args.merge]
    rows: list[dict[str, Any]] = [row for result in earlier for row in result["rows"]]
    phases = args.phase.split(",")
    torch.set_float32_matmul_precision(args.precision)
    for case in names_of("small" if args.models == "twelve" else args.models):
        for phase in phases:
            try:
                row = measure(case, phase, args.small, args.seconds)
                print(_line(row), flush=True)
            except Exception as error:
                row = {"model": case.name, "phase": phase, "failed": f"{type(error).__name__}: {error}"}
                print(f"{case.name:>24} {phase:>5}  failed: {str(error)[:500]}", flush=True)
            rows = [r for r in rows if (r["model"], r["phase"]) != (row["model"], row["phase"])] + [row]
            write_json(args.json, _result(rows))
    result = (
        {**_result(rows), "merged": [{k: r[k] for k in ("command", *ABOUT)} for r in earlier]}
        if earlier
        else _result(rows)
    )
    if earlier and not args.models:  # nothing was measured here
        result |= {key: earlier[-1][key] for key in ABOUT}
    write_json(args.json, result)
    for phase, means in result["summary"].items():
        print(
            f"{phase}: geometric means over lazy: "
            + ", ".join(f"{way} {mean:.2f}x" for way, mean in means.items())
        )
    return 0 if not any("failed" in row for row in rows) else 1


def _result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, dict[str, float]] = {}
    for phase in dict.fromkeys(row["phase"] for row in rows):
        measured = [row["ways"] for row in rows if row["phase"] == phase and "ways" in row]
        names = dict.fromkeys(name for ways in measured for name in ways if name != "lazy")
        summary[phase] = {
            name: geometric_mean([w[name]["over_lazy"] for w in measured if name in w]) for name in names
        }
    return {
        "command": " ".join(sys.argv[1:]),
        "torch": torch.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": f"{platform_name()} {jax.devices()[0].device_kind}",
        "threads": torch.get_num_threads(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "rows": rows,
        "summary": summary,
    }


def _line(row: dict[str, Any]) -> str:
    ways = "  ".join(f"{name} {t['ms']:.3f} ms ({t['over_lazy']:.2f}x)" for name, t in row["ways"].items())
    extra = row["ways"]["trace_once"].get("us_over_jax")
    return f"{row['model']:>24} {row['phase']:>5}  {ways}" + (
        f"  trace_once - jax: {extra:.0f} us" if extra is not None else ""
    )
