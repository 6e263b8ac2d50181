"""Ways to run a program (eager, torch.compile, dynamotor), each timed in a process of its own, so that memory
is that way's alone and a failure ends one figure.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def compiler_of(way: str, mode: str | None) -> Callable[[Any], Any]:
    """The function that compiles for a way; a way of neither name is dynamotor's."""
    if way == "eager":
        return lambda f: f
    if way == "torch.compile":
        return lambda f: torch.compile(f, mode=mode)
    import dynamotor

    return lambda f: dynamotor.compile(f, mode=mode)


def finish(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], object], count: int, device: str) -> list[float]:
    """Milliseconds of each of `count` calls."""
    times = []
    gc.collect()
    for _ in range(count):
        finish(device)
        start = time.perf_counter()
        call()
        finish(device)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def in_process(arguments: Sequence[str], timeout: float, echo: bool = False) -> dict[str, Any]:
    """The figures that `python -m bench *arguments` prints last, as JSON; {"error": reason} if it prints none."""
    command = [sys.executable, "-m", "bench", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {timeout:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if echo:
        print(done.stdout, flush=True)
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no answer"])[-1][:400]}
    return json.loads(lines[-1])
