"""Ways to run a program (eager, torch.compile, dynamotor), each timed in a process of its own, so that memory
is that way's alone and a failure ends one figure.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections import Counter
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


def print_kernels(call: Callable[[], object], device: str, parts: int = 1, most: int = 24) -> None:
    """Print the kernels of a call (ops on a CPU) that take longest, in microseconds for each of its parts."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        call()
        finish(device)
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in seen.events() or ():
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        microseconds = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        spent[event.name[:80]] += microseconds / parts
        count[event.name[:80]] += 1
    print(f"kernels: {sum(spent.values()):.0f} us a part, {sum(count.values()) / parts:.0f} launches")
    for name, us in spent.most_common(most):
        print(f"  {us:9.1f} us x{count[name] / parts:.1f} {name}", flush=True)
