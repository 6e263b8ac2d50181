"""`python -m dynamotor bench --xla --overhead`: what recording an operation costs on the host, beside eager's
CPU, the cost of a call of the bridge beside `jax.jit` of the same program, and the first training step of
short and long LSTMs.

Recording: the least of many short runs in turns, since on a shared machine anything else measures the
neighbours. Calls: in each round the least of a few calls of each way; the medians of the rounds, and of their
ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import torch

from bench.tool import write_json
from dynamotor.api import compile as dynamotor_compile
from dynamotor.base.events import collect
from dynamotor.xla import execute
from dynamotor.xla.sync import sync

_OPS = 200
_CALLS = 20
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a + b": lambda a, b: a + b,
    "a * 0.3": lambda a, b: a * 0.3,
    "a.relu()": lambda a, b: a.relu(),
    "a @ b": lambda a, b: a @ b,
    "a.t()": lambda a, b: a.t(),
    "a.view(2, 8)": lambda a, b: a.view(2, 8),
    "a.add_(b)": lambda a, b: a.add_(b),
    "a.sum(1)": lambda a, b: a.sum(1),
}


def recording(operation: Callable, seconds: float) -> dict[str, float]:
    """Microseconds an operation on small tensors, without running it: on the CPU, and recorded on xla."""
    operands = {device: [torch.ones(4, 4).to(device) for _ in range(2)] for device in ("cpu", "xla")}
    least = dict.fromkeys(operands, float("inf"))
    end, runs = time.perf_counter() + seconds, 0
    while runs < 5 or time.perf_counter() < end:  # the first ones compile
        runs += 1
        for device, (a, b) in operands.items():
            start = time.perf_counter()
            for _ in range(_OPS):
                operation(a, b)
            least[device] = min(least[device], (time.perf_counter() - start) / _OPS * 1e6)
        sync(wait=True)
    return {**least, "ratio": least["xla"] / least["cpu"]}


def bridge_call(width: int, seconds: float) -> dict[str, float]:
    """Microseconds of a call of an MLP that waits for its result: through the bridge, through `jax.jit`, and
    by the runtime's own interface, which the bridge uses. Those of the calling thread beside those of the
    clock.
    """
    layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
    model, x = (
        torch.nn.Sequential(*layers, torch.nn.Linear(width, 10)).to("xla"),
        torch.randn(32, width).to("xla"),
    )
    fast = dynamotor_compile(model, backend="xla")
    with torch.no_grad(), collect("xla.program") as programs:
        fast(x)
    program = programs[0].data["program"]
    arrays, jitted = program.gather(programs[0].data["inputs"]), jax.jit(execute.to_function(program.graph))
    ways: dict[str, Callable[[], Any]] = {
        "bridge": lambda: fast(x)._alias.node.data.block_until_ready(),
        "jit": lambda: jitted(*arrays)[0].block_until_ready(),
        "runtime": lambda: program.start(arrays)[0].block_until_ready(),
    }
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    with torch.no_grad():
        while time.perf_counter() < end:
            least = {
                name: [min(each) for each in zip(*[_took(way) for _ in range(_CALLS)])]
                for name, way in ways.items()
            }
            rounds.append(
                {f"{name}{clock}": took for name in ways for clock, took in zip(("", " thread"), least[name])}
            )
    ratio = statistics.median([found["bridge"] / found["jit"] for found in rounds])
    return {
        **{name: statistics.median([found[name] for found in rounds]) for name in rounds[0]},
        "ratio": ratio,
    }


def _took(way: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of the clock and of this thread."""
    start, start_thread = time.perf_counter(), time.thread_time()
    way()
    return (time.perf_counter() - start) * 1e6, (time.thread_time() - start_thread) * 1e6


def first_lstm_step(length: int) -> float:
    """Seconds of CPU for the first forward and backward pass of an LSTM on xla: recording, compiling and
    running them.
    """
    model, x = (
        torch.nn.LSTM(16, 32, num_layers=2, batch_first=True).to("xla"),
        torch.randn(4, length, 16).to("xla"),
    )
    start = time.process_time()
    model(x)[0].square().mean().backward()
    sync(wait=True)
    return time.process_time() - start


def main(args: argparse.Namespace) -> int:
    """Measure, print, and write `--json` where it is given."""
    rows: list[dict[str, Any]] = []
    for name, operation in OPERATIONS.items():
        row = recording(operation, args.seconds / 4)
        rows.append({"recording": name, **row})
        print(
            f"{name:>16}  cpu {row['cpu']:6.2f} us  recorded {row['xla']:6.2f} us  {row['ratio']:.2f}x",
            flush=True,
        )
    for width in (64, 256):
        row = bridge_call(width, args.seconds)
        rows.append({"mlp": width, **row})
        name = f"MLP of {width}"
        print(
            f"{name:>16}  jit {row['jit']:6.1f} us  bridge {row['bridge']:6.1f} us  {row['ratio']:.2f}x   thread: "
            + ", ".join(f"{way} {row[f'{way} thread']:.1f}" for way in ("jit", "bridge", "runtime")),
            flush=True,
        )
    first_lstm_step(5)  # what any first step loads
    steps = {length: first_lstm_step(length) for length in (12, 500)}
    rows.append({"lstm": steps})
    print(
        f"  first LSTM step  12 steps {steps[12]:.2f} s  500 steps {steps[500]:.2f}s {steps[500] / steps[12]:.2f}x",
        flush=True,
    )
    write_json(args.json, rows)
    return 0
