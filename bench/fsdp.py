"""Training steps of a language model under FSDP2 (`fully_shard` a block and the root, bf16 weights, float32
reductions, AdamW): eager beside torch.compile and dynamotor, block by block, the whole model, and `compile_step`.

One process a GPU; each way trains the same model on the same batches, so that loss curves can be compared.

    NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 2 -m bench.fsdp                # about five minutes
    NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 4 -m bench.fsdp --replicas 2   # HSDP
    torchrun --standalone --nproc-per-node 2 -m bench.fsdp --device cpu --small              # a minute, anywhere
    torchrun ... -m bench.fsdp --float8 tensorwise --gather-float8                           # needs torchao
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench import float8, ranks


def main(argv: list[str] | None = None) -> int:
    """Run the ways one after the other; rank 0 prints a table; --json writes the figures."""
    parser = ranks.parser_of("bench.fsdp", __doc__, "2x2048")
    parser.add_argument("--replicas", type=int, default=1, help="more than one: HSDP")
    parser.add_argument("--kept", action="store_true", help="reshard_after_forward=False")
    parser.add_argument("--float8", default=float8.NONE, choices=float8.RECIPES, help="torchao's recipe")
    parser.add_argument("--gather-float8", action="store_true", help="weights are gathered in float8")
    args = parser.parse_args(argv)
    ranks.check_ways(parser, args)
    if args.float8 != float8.NONE and float8.missing():
        parser.error(float8.missing())
    name = "fsdp" if args.replicas == 1 else f"hsdp of {args.replicas}"
    name += f", {args.float8}" if args.float8 != float8.NONE else ""
    return ranks.run(args, [name + (", gathered" if args.gather_float8 else "")], _build)


def _mesh(args: argparse.Namespace) -> DeviceMesh:
    world = dist.get_world_size()
    if args.replicas == 1:
        return init_device_mesh(args.device, (world,))
    names = ("replicas", "shards")
    return init_device_mesh(args.device, (args.replicas, world // args.replicas), mesh_dim_names=names)


def _build(args: argparse.Namespace, name: str, way: str, length: int) -> ranks.Job:
    config, model = ranks.model_on(args, length)
    float8.convert(model, args.float8, emulate=args.device != "cuda", gather=args.gather_float8)
    half = torch.bfloat16 if args.device == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mesh": _mesh(args), "mp_policy": policy}
    if args.kept:
        settings["reshard_after_forward"] = False
    layers = model.model.layers
    ranks.compile_blocks(way, layers)
    for layer in layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.device == "cuda")
    if way == "compile_step":
        import dynamotor

        whole = dynamotor.compile_step(model, lambda out, ids: _loss(out.logits, ids), optimizer)
        return ranks.Job(lambda ids: whole(ids, ids), config.vocab_size, dist.get_rank())
    call = ranks.compiled(way, model, layers)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(call(ids).logits, ids)
        loss.backward()
        optimizer.step()
        if args.gather_float8:
            float8.find_scales(model)
        return loss.detach()

    return ranks.Job(step, config.vocab_size, dist.get_rank())


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    return torch.nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1))


if __name__ == "__main__":
    sys.exit(main())
