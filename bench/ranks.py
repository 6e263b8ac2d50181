"""Training steps timed way by way on every rank of a process group, for `bench.fsdp` and `bench.parallel`.

Each way trains the same model on the same batches, so that loss curves can be compared; rank 0 prints.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench import torchvision_stub
from bench.llm_rows import MODELS, SMALL, model_of
from bench.measure import quartiles
from bench.tool import write_json
from bench.ways import finish
from dynamotor.tools.tables import render

WAYS = (
    "eager",
    "torch.compile blocks",
    "dynamotor blocks",
    "torch.compile whole",
    "dynamotor whole",
    "compile_step",
)
COLUMNS = (
    "row",
    "way",
    "ms",
    "quartiles",
    "of torch.compile's best",
    "peak GiB",
    "reserved GiB",
    "first s",
    "graphs",
    "loss 1, 10, 50",
)


@dataclass
class Job:
    """A training step: from a batch of ids to the loss of this rank. data_rank: ranks of one number get the
    same batches.
    """

    step: Callable[[torch.Tensor], torch.Tensor]
    vocabulary: int
    data_rank: int


Build = Callable[[argparse.Namespace, str, str, int], Job]  # of the arguments, row, way and length


def parser_of(module: str, text: str | None, size: str) -> argparse.ArgumentParser:
    """The options that both tools have."""
    parser = argparse.ArgumentParser(
        prog=f"torchrun ... -m {module}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="llama-1.2b", choices=list(MODELS))
    parser.add_argument("--size", default=size, help="BATCHxLENGTH of each rank that has batches of its own")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int, default=50, help="of the loss curve; the last 30 are timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="two narrow layers and short sequences")
    parser.add_argument("--json", help="file for the figures")
    return parser


def run(
    args: argparse.Namespace, names: list[str], build: Build, sizes: Mapping[str, str] | None = None
) -> int:
    """Rows by ways, one after the other; rank 0 prints a table and writes --json after each. sizes: of rows,
    where --size is empty.
    """
    torchvision_stub.prepare()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    first = dist.get_rank() == 0
    rows: list[dict[str, Any]] = []
    for name in names:
        for way in args.ways.split(","):
            rows.append(_row(args, name, way, args.size or (sizes or {})[name], build))
            if first:
                print(json.dumps(rows[-1]), flush=True)
                write_json(args.json, {"argv": sys.argv[1:], "torch": torch.__version__, "rows": rows})
    if first:
        print(render([_line(rows, row) for row in rows], COLUMNS))
    dist.destroy_process_group()
    return int(any("error" in row for row in rows))


def check_ways(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message where a way has no such name."""
    if unknown := set(args.ways.split(",")) - set(WAYS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")


def _row(args: argparse.Namespace, name: str, way: str, size: str, build: Build) -> dict[str, Any]:
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    try:
        found = _measured(args, name, way, size, build)
    except Exception as error:  # one way's failure ends no other; all ranks fail alike
        found = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    if way.startswith("torch.compile"):
        torch.compiler.reset()
    return {"row": name, "way": way, "world": dist.get_world_size(), "size": size, **found}


def _measured(args: argparse.Namespace, name: str, way: str, size: str, build: Build) -> dict[str, Any]:
    batch, length = [int(n) for n in size.split("x")]
    if args.small:
        batch, length = 2, min(length, 64)
    start, graphs = time.perf_counter(), _graphs(way)
    job = build(args, name, way, length)
    made = time.perf_counter() - start
    draw = torch.Generator().manual_seed(job.data_rank)
    pool = [
        torch.randint(0, job.vocabulary, (batch, length), generator=draw).to(args.device) for _ in range(8)
    ]
    losses, times, timed = [], [], max(args.steps - 30, args.steps // 2)
    start = time.perf_counter()
    for n in range(args.steps):
        if n == timed and args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        finish(args.device)
        began = time.perf_counter()
        loss = job.step(pool[n % len(pool)])
        finish(args.device)
        if n >= timed:
            times.append(1e3 * (time.perf_counter() - began))
        if n == 0:
            first = time.perf_counter() - start
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    found = {"ms": quartiles(times), "first_s": first, "made_s": made, "loss": losses}
    return found | {"graphs": _graphs(way) - graphs} | _memory(args.device)


def _graphs(way: str) -> int:
    """How many graphs the compiler of a way has captured."""
    if way.startswith("torch.compile"):
        from torch._dynamo.utils import counters as found

        return found["stats"]["unique_graphs"]
    from dynamotor.base.events import counters

    return counters["capture"]["graphs"]


def _memory(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"device": device}
    return {
        "device": torch.cuda.get_device_name(),
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30,
    }


def model_on(args: argparse.Namespace, length: int) -> tuple[Any, Any]:
    """The model's configuration and the model, with the same weights on every rank and for every way."""
    torch.manual_seed(0)
    with torch.device(args.device):  # a host takes 15 s for the weights of a billion
        config, model = model_of(args.model, length, SMALL if args.small else {})
    return config, model.train()


def compile_blocks(way: str, layers: torch.nn.ModuleList) -> None:
    """Compile each block by torch.compile, if the way is that: before `fully_shard`, as torchtitan does."""
    if way == "torch.compile blocks":
        for layer in layers:
            layer.compile()


def compiled(way: str, model: torch.nn.Module, layers: torch.nn.ModuleList) -> Any:
    """The model as a way calls it."""
    if way == "torch.compile whole":
        return torch.compile(model)
    if not way.startswith("dynamotor"):
        return model
    import dynamotor

    if way == "dynamotor whole":
        return dynamotor.compile(model)
    for i, layer in enumerate(layers):
        layers[i] = dynamotor.compile(layer)
    return model


def _line(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[str]:
    head = [row["row"], row["way"]]
    if "error" in row:
        return [*head, row["error"][:60], *[""] * (len(COLUMNS) - 3)]
    low, middle, high = row["ms"]
    peers = [r["ms"][1] for r in rows if r["row"] == row["row"] and "ms" in r and "torch" in r["way"]]
    losses = [row["loss"][min(n, len(row["loss"])) - 1] for n in (1, 10, 50)]
    return [
        *head,
        f"{middle:.1f}",
        f"{low:.1f} to {high:.1f}",
        f"{middle / min(peers):.3f}" if peers else "",
        f"{row.get('peak_GiB', 0):.2f}",
        f"{row.get('reserved_GiB', 0):.2f}",
        f"{row['first_s']:.1f}",
        str(row["graphs"]),
        ", ".join(f"{loss:.4f}" for loss in losses),
    ]
