"""Training steps of a language model over several ranks, beside `bench.fsdp`: eager, torch.compile and dynamotor.

tp       tensor parallel over all ranks: attention heads, the MLP, the vocabulary of embedding, head and loss;
         norms in parts of the sequence; weights and AdamW in bf16
cp       context parallel over all ranks (causal ring attention), weights by `fully_shard` over the same ranks
tp+fsdp  tensor parallel over pairs of ranks and `fully_shard` over the pairs (four ranks or more)

NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 2 -m bench.parallel                   # tp and cp
NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 4 -m bench.parallel --rows tp+fsdp
torchrun --standalone --nproc-per-node 2 -m bench.parallel --device cpu --small --steps 4       # anywhere
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from bench import ranks, ring_attention

ROWS = ("tp", "cp", "tp+fsdp")
SIZES = {"tp": "4x2048", "cp": "2x4096", "tp+fsdp": "4x2048"}
Around = Callable[[list[torch.Tensor]], AbstractContextManager[Any]]
INSIDE = "the loss is a part of the compiled program"


class Net(nn.Module):
    """The parts of a Llama model called in turn: positions are an argument, since a rank may hold any of them.
    With targets it gives the loss.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        trunk = model.model
        self.embed, self.layers, self.norm = trunk.embed_tokens, trunk.layers, trunk.norm
        self.rotary, self.head = trunk.rotary_emb, model.lm_head

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed(ids)
        angles = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=angles)
        logits = self.head(self.norm(x))
        return logits if targets is None else loss_of(logits, targets)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def split_tensors(net: Net, mesh: DeviceMesh) -> None:
    """The plan of torchtitan's Llama: activations between the blocks are parts of the sequence."""
    whole: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    hidden = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
    given: dict[str, Any] = {"input_kwarg_layouts": hidden[0], "desired_input_kwarg_layouts": hidden[1]}
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    block: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(**given),
        "mlp": PrepareModuleInput(**whole),
    }
    block |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    block |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    block |= {
        name: RowwiseParallel(output_layouts=Shard(1)) for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    parallelize_module(net, mesh, plan)
    for layer in net.layers:
        parallelize_module(layer, mesh, block)


def main(argv: list[str] | None = None) -> int:
    """Run rows by ways; rank 0 prints a table; --json writes the figures."""
    parser = ranks.parser_of("bench.parallel", __doc__, "")
    parser.add_argument("--rows", default="tp,cp", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--loss", choices=("inside", "outside"), default="inside", help=INSIDE)
    args = parser.parse_args(argv)
    ranks.check_ways(parser, args)
    if unknown := set(args.rows.split(",")) - set(ROWS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return ranks.run(args, args.rows.split(","), _build, SIZES)


def _build(args: argparse.Namespace, name: str, way: str, length: int) -> ranks.Job:
    config, model = ranks.model_on(args, length)
    net, half = Net(model), torch.bfloat16 if args.device == "cuda" else torch.float32
    world, shards, data_rank = dist.get_world_size(), None, 0
    around: Around = _split_loss
    if name == "tp":
        for weight in net.parameters():  # not the buffer of frequencies
            weight.data = weight.data.to(half)
        split_tensors(net, init_device_mesh(args.device, (world,)))
    elif name == "cp":
        shards = init_device_mesh(args.device, (world,))
        around = _split_sequence(shards)
    else:
        both = init_device_mesh(args.device, (world // 2, 2), mesh_dim_names=("data", "tensors"))
        split_tensors(net, both["tensors"])
        shards, data_rank = both["data"], both.get_local_rank("data")
    ranks.compile_blocks(way, net.layers)
    if shards is not None:
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for layer in net.layers:
            fully_shard(layer, mesh=shards, mp_policy=policy)
        fully_shard(net, mesh=shards, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=args.device == "cuda")
    run = _steps(args, way, net, optimizer)
    places = torch.arange(length, device=args.device)[None]

    def step(ids: torch.Tensor) -> torch.Tensor:
        batch = [ids.clone(), places.clone(), ids.roll(-1, 1)]
        with around(batch):
            loss = run(*batch)
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach().clone()

    return ranks.Job(step, config.vocab_size, data_rank)


def _steps(
    args: argparse.Namespace, way: str, net: Net, optimizer: torch.optim.Optimizer
) -> Callable[..., torch.Tensor]:
    """Forward, loss, backward and update, of ids, positions and targets."""
    if way == "compile_step":
        import dynamotor

        return dynamotor.compile_step(net, loss_of, optimizer, n_inputs=2)
    call = ranks.compiled(way, net, net.layers)

    def run(ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        inside = args.loss == "inside"
        loss = call(ids, positions, targets) if inside else loss_of(call(ids, positions), targets)
        loss.backward()
        optimizer.step()
        return loss

    return run


def _split_loss(batch: list[torch.Tensor]) -> AbstractContextManager[Any]:
    return loss_parallel()


def _split_sequence(mesh: DeviceMesh) -> Around:
    @contextlib.contextmanager
    def around(batch: list[torch.Tensor]) -> Any:
        cpu = ring_attention.on_cpu() if batch[0].device.type == "cpu" else contextlib.nullcontext()
        given: dict[str, Any] = {"buffers": batch, "buffer_seq_dims": [1] * len(batch)}
        with cpu, context_parallel(mesh, **given, no_restore_buffers=set(batch)):
            yield

    return around


if __name__ == "__main__":
    sys.exit(main())
