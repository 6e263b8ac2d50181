"""A whole training step on one device and on several through SPMD: samples per second beside one device's.

python -m bench xla_scaling [--devices 1,2,4] [--model BertForMaskedLM] [--batch 32] [--dtype bfloat16] [--layout data]
                            [--small] [--seconds 20] [--json docs/results/h200-xla-scaling.json]

`compile_step` with AdamW. `--batch` is that of one device: the batch of N devices is N times as large, and divided over
them; parameters are whole on each (`--layout data`), or divided over them too (`--layout fsdp`). Each number of devices
runs in a process of its own, which sees as many GPUs (without a GPU: virtual devices of the CPU, which share its cores
and show that results are right, but no speed). The processes take turns. One more process runs the largest batch
on one device: the first losses of both must agree within TOLERANCE, or AGREE where the dtype is float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.tool import read_json, write_json

from . import models
from .json_worker import JsonWorker
from .measure import once, quartiles
from .xla_families import Loss, cast, optimizer_of

STEPS = 4  # whose losses are compared
TURN = 0.5  # seconds
TOLERANCE, AGREE = 2e-2, 1e-4  # relative
LIMIT = 400.0  # seconds until a process has compiled


def step_of(options: argparse.Namespace) -> tuple[Callable[[int], torch.Tensor], Callable[[], int]]:
    """The training step by number, which repeats the batches of the first STEPS; and the number of programs so far."""
    from dynamotor.xla import compile_step, metrics, runtime  # noqa: PLC0415 - jax starts under the flags of the child
    from dynamotor.xla.distributed import spmd  # noqa: PLC0415

    case = models.load(options.model, small=options.small, batch=options.batch, dropout=False)
    model = Loss(case)
    dtype = getattr(torch, options.dtype)
    batches = [
        [cast(case.make_inputs(i, train=True)[1][key], dtype).to("xla") for key in model.names]
        for i in range(STEPS)
    ]
    model = model.to(dtype).to("xla")
    if options.child > 1:
        runtime.use_spmd()
        mesh = spmd.Mesh(range(options.child), (options.child,), ("data",))
        for tensors in batches:
            for t in tensors:
                spmd.mark_sharding(t, mesh, ("data", *[None] * (t.dim() - 1)))
        for parameter in model.parameters() if options.layout == "fsdp" else ():
            spmd.mark_sharding(parameter, mesh, ("data", *[None] * (parameter.dim() - 1)))
    step = compile_step(model, lambda loss: loss, optimizer_of(model), n_inputs=len(model.names))
    return lambda i: step(*batches[i % STEPS]), lambda: metrics.counters["UncachedCompile"]


def child(options: argparse.Namespace) -> None:
    """Say the first losses, then for each line that comes the seconds of a step."""
    from dynamotor.xla.transfer import array  # noqa: PLC0415

    torch.set_num_threads(1)
    start = time.perf_counter()
    step, programs = step_of(options)
    losses, counts = [], []
    for i in range(STEPS):
        loss = step(i)
        losses.append(loss.item())
        counts.append(programs())
    devices = len(array(loss).devices())
    first = {"losses": losses, "programs": counts, "devices": devices, "first_s": time.perf_counter() - start}
    print(json.dumps(first), flush=True)
    repeat = max(1, int(TURN / max(once(lambda: step(0).item()), 1e-3)))
    for _ in sys.stdin:
        begin = time.perf_counter()
        for i in range(repeat):
            loss = step(i)
        loss.item()
        print(json.dumps({"seconds": (time.perf_counter() - begin) / repeat}), flush=True)


def worker(options: argparse.Namespace, devices: int, batch: int) -> JsonWorker:
    """A process that sees `devices` devices and takes `batch` samples a step."""
    env = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", HF_HUB_OFFLINE="1")
    if torch.cuda.is_available():
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(devices)))
    else:
        flags = env.get("XLA_FLAGS", "")
        env["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    command = [sys.executable, "-m", "bench", "xla_scaling", "--child", str(devices), "--batch", str(batch)]
    command += ["--model", options.model, "--dtype", options.dtype, "--layout", options.layout]
    return JsonWorker(command + ["--small"] * options.small, env)


def answer(process: JsonWorker, seconds: float) -> dict[str, Any]:
    """The next message of a process; its last words as an error where there is none in time."""
    message = process.next(time.monotonic() + seconds)
    if message is None:
        raise RuntimeError(process.end())
    return message


def compared(first: dict[str, Any], single: dict[str, Any], devices: int, dtype: str) -> dict[str, Any]:
    """Whether N devices gave the losses of one for the same batch, took part, and compiled nothing after step 2."""
    off = max(abs(a - b) / abs(b) for a, b in zip(first["losses"], single["losses"], strict=True))
    right = off <= (AGREE if dtype == "float32" else TOLERANCE)
    right &= first["devices"] == devices and first["programs"][1] == first["programs"][-1]
    return {"right": right, "difference": off}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rows by number of devices: samples per second, beside one device's with quartiles."""
    counts = sorted({1, *map(int, options.devices.split(","))})
    whole = worker(options, 1, counts[-1] * options.batch)
    single = answer(whole, LIMIT)
    whole.end()
    processes = {n: worker(options, n, n * options.batch) for n in counts}
    firsts = {n: answer(process, LIMIT) for n, process in processes.items()}
    rounds: list[dict[int, float]] = []
    end = time.perf_counter() + options.seconds
    while len(rounds) < 5 or time.perf_counter() < end:
        times = {}
        for n in counts if len(rounds) % 2 else counts[::-1]:
            processes[n].send("go")
            times[n] = answer(processes[n], LIMIT)["seconds"]
        rounds.append(times)
    for process in processes.values():
        process.end()
    rows = {}
    for n in counts:
        low, middle, high = quartiles([n * times[1] / times[n] for times in rounds])
        rate = n * options.batch / statistics.median(times[n] for times in rounds)
        rows[str(n)] = {"samples_per_s": rate, "over_one": middle, "low": low, "high": high, **firsts[n]}
    rows[str(counts[-1])] |= compared(firsts[counts[-1]], single, counts[-1], options.dtype)
    return {"rounds": len(rounds), "one_device": single, "devices": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", default="1,2", help="numbers of devices")
    parser.add_argument("--model", default="BertForMaskedLM")
    parser.add_argument("--batch", type=int, default=32, help="samples of one device")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layout", default="data", choices=("data", "fsdp"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", help="file for the figures; an earlier run's are kept")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return 0
    found, row = read_json(options.json), measure(options)
    found[f"{options.model} {options.batch} {options.dtype} {options.layout}"] = row
    write_json(options.json, found)
    for n, each in row["devices"].items():
        spread = f"{each['over_one']:.2f} ({each['low']:.2f} to {each['high']:.2f})"
        print(
            f"{n} devices: {each['samples_per_s']:.1f} samples/s, {spread} times one, first step {each['first_s']:.0f} s"
        )
    last = list(row["devices"].values())[-1]
    print(f"losses {'agree' if last['right'] else 'DIFFER'}: {last['difference']:.1e}")
    return int(not last["right"])


if __name__ == "__main__":
    raise SystemExit(main())
