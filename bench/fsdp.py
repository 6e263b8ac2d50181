"""Training steps of a language model under FSDP2 (`fully_shard` a block and the root, bf16 weights, float32
reductions, AdamW): eager beside torch.compile and dynamotor, block by block, the whole model, and `compile_step`.

One process a GPU; each way trains the same model on the same batches, so that loss curves can be compared.

    NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 2 -m bench.fsdp                # about five minutes
    NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 4 -m bench.fsdp --replicas 2   # HSDP
    torchrun --standalone --nproc-per-node 2 -m bench.fsdp --device cpu --small              # a minute, anywhere
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
    "way",
    "ms",
    "quartiles",
    "of its peer's time",
    "peak GiB",
    "reserved GiB",
    "first s",
    "loss 1, 10, 50",
)


def main(argv: list[str] | None = None) -> int:
    """Run the ways one after the other; rank 0 prints a table; --json writes the figures."""
    args = _arguments(argv)
    torchvision_stub.prepare()
    rank = int(os.environ["RANK"])
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rows: list[dict[str, Any]] = []
    for way in args.ways.split(","):
        rows.append(_row(args, way))
        if rank == 0:
            print(json.dumps(rows[-1]), flush=True)
            write_json(args.json, {"argv": sys.argv[1:], "rows": rows})
    if rank == 0:
        print(render([_line(rows, row) for row in rows], COLUMNS))
    dist.destroy_process_group()
    return int(any("error" in row for row in rows))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m bench.fsdp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--row", default="llama-1.2b", choices=list(MODELS))
    parser.add_argument("--size", default="2x2048", help="BATCHxLENGTH of each rank")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument(
        "--steps", type=int, default=50, help="steps of the loss curve; the last 30 are timed"
    )
    parser.add_argument("--replicas", type=int, default=1, help="more than one: HSDP")
    parser.add_argument("--kept", action="store_true", help="reshard_after_forward=False")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="two narrow layers and short sequences")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args(argv)
    if unknown := set(args.ways.split(",")) - set(WAYS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return args


def _row(args: argparse.Namespace, way: str) -> dict[str, Any]:
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    try:
        found = _measured(args, way)
    except Exception as error:  # one way's failure ends no other; all ranks fail alike
        found = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    if way.startswith("torch.compile"):
        torch.compiler.reset()
    return {"way": way, "world": dist.get_world_size(), "replicas": args.replicas, "size": args.size, **found}


def _measured(args: argparse.Namespace, way: str) -> dict[str, Any]:
    batch, length = [int(n) for n in args.size.split("x")]
    if args.small:
        batch, length = 2, min(length, 64)
    step, vocabulary = _step(args, way, length)
    draw = torch.Generator().manual_seed(dist.get_rank())
    pool = [torch.randint(0, vocabulary, (batch, length), generator=draw).to(args.device) for _ in range(8)]
    losses, times, timed = [], [], max(args.steps - 30, args.steps // 2)
    start = time.perf_counter()
    for n in range(args.steps):
        if n == timed and args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        finish(args.device)
        began = time.perf_counter()
        loss = step(pool[n % len(pool)])
        finish(args.device)
        if n >= timed:
            times.append(1e3 * (time.perf_counter() - began))
        if n == 0:
            first = time.perf_counter() - start
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    return {"ms": quartiles(times), "first_s": first, "loss": losses} | _memory(args.device)


def _memory(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"device": device}
    return {
        "device": torch.cuda.get_device_name(),
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_GiB": torch.cuda.max_memory_reserved() / 2**30,
    }


def _mesh(args: argparse.Namespace) -> DeviceMesh:
    world = dist.get_world_size()
    if args.replicas == 1:
        return init_device_mesh(args.device, (world,))
    names = ("replicas", "shards")
    return init_device_mesh(args.device, (args.replicas, world // args.replicas), mesh_dim_names=names)


def _step(
    args: argparse.Namespace, way: str, length: int
) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """A training step, and the number of words."""
    torch.manual_seed(0)
    config, model = model_of(args.row, length, SMALL if args.small else {})
    model = model.to(args.device).train()
    half = torch.bfloat16 if args.device == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mesh": _mesh(args), "mp_policy": policy}
    if args.kept:
        settings["reshard_after_forward"] = False
    layers = model.model.layers
    if way == "torch.compile blocks":
        for layer in layers:
            layer.compile()
    for layer in layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.device == "cuda")
    if way == "compile_step":
        import dynamotor

        whole = dynamotor.compile_step(model, lambda out, ids: _loss(out.logits, ids), optimizer)
        return lambda ids: whole(ids, ids), config.vocab_size
    call: Any = model
    if way == "torch.compile whole":
        call = torch.compile(model)
    elif way.startswith("dynamotor"):
        import dynamotor

        if way == "dynamotor whole":
            call = dynamotor.compile(model)
        else:
            for i, layer in enumerate(layers):
                layers[i] = dynamotor.compile(layer)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(call(ids).logits, ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, config.vocab_size


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    return torch.nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1))


def _line(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["way"], row["error"][:60], "", "", "", "", "", ""]
    low, middle, high = row["ms"]
    peer = "torch.compile blocks" if "blocks" in row["way"] else "torch.compile whole"
    base = next((r for r in rows if r["way"] == peer and "ms" in r), None)
    losses = [row["loss"][min(n, len(row["loss"])) - 1] for n in (1, 10, 50)]
    return [
        row["way"],
        f"{middle:.1f}",
        f"{low:.1f} to {high:.1f}",
        f"{middle / base['ms'][1]:.3f}" if base else "",
        f"{row.get('peak_GiB', 0):.2f}",
        f"{row.get('reserved_GiB', 0):.2f}",
        f"{row['first_s']:.1f}",
        ", ".join(f"{loss:.4f}" for loss in losses),
    ]


if __name__ == "__main__":
    sys.exit(main())
