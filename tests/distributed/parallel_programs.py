"""A small language model trained on two ranks in each way that PyTorch divides one, compiled, beside the whole
model trained by each rank alone.

>>> pair.run(compared, "tensor parallel", "whole", folder)    # on each rank: {"worst": 1e-15, ...}
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import dynamotor
from bench import ring_attention
from dynamotor.base.events import counters

WORDS, LENGTH, WIDTH, HEAD, BATCH = 32, 16, 16, 4, 4
Tensors = dict[str, torch.Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = [part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = [
            nn.Linear(*sizes) for sizes in ((WIDTH, 24), (WIDTH, 24), (24, WIDTH))
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.RMSNorm(WIDTH, eps=1e-6), Attention()
        self.between, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Net(nn.Module):
    """The model, or the half of it that a pipeline's stage has: parameters have the whole model's names."""

    def __init__(self) -> None:
        super().__init__()
        self.words: Any = nn.Embedding(WORDS, WIDTH)
        self.places: Any = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleDict({str(n): Block() for n in range(2)})
        self.norm: Any = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head: Any = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if self.words is not None:
            x = self.words(x) + self.places(positions)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))

    def half(self, stage: int) -> Net:
        del self.blocks[str(1 - stage)]
        for name in ("words", "places") if stage else ("norm", "head"):
            setattr(self, name, None)
        return self


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Way:
    """A way to divide the model: `divide` changes it in place, `own` gives the part of a batch that this rank reads,
    `around` is entered for a step.
    """

    divide: Callable[[Net], Any]
    own: Callable[[list[torch.Tensor]], list[torch.Tensor]] = lambda batch: batch
    around: Callable[[list[torch.Tensor]], Any] = lambda batch: contextlib.nullcontext()


def _shard(*sizes: int) -> Callable[[Net], None]:
    def divide(net: Net) -> None:
        names = ("replicas", "shards")[-len(sizes) :]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for block in net.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)

    return divide


def _own_rows(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    return [part.chunk(2)[dist.get_rank()] for part in batch]


def _split_tensors(net: Net) -> None:
    whole: dict[str, Any] = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    words: dict[str, Any] = {"input_layouts": Replicate(), "output_layouts": Shard(1)}
    last: dict[str, Any] = {"input_layouts": Shard(1), "output_layouts": Shard(-1), "use_local_output": False}
    block: dict[str, Any] = {name: SequenceParallel() for name in ("before", "between")}
    block |= {name: PrepareModuleInput(**whole) for name in ("attention", "mlp")}
    block |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    block |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    block |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "mlp.down")}
    plan: dict[str, Any] = {"words": RowwiseParallel(**words), "places": RowwiseParallel(**words)}
    plan |= {"norm": SequenceParallel(), "head": ColwiseParallel(**last)}
    plan |= {f"blocks.{n}.{name}": style for n in range(2) for name, style in block.items()}
    parallelize_module(net, init_device_mesh("cpu", (2,)), plan)


@contextlib.contextmanager
def _split_sequence(batch: list[torch.Tensor]) -> Iterator[None]:
    mesh = init_device_mesh("cpu", (2,))
    given: dict[str, Any] = {"buffers": batch, "buffer_seq_dims": [1] * len(batch)}
    options = ring_attention.ring._cp_options
    options.convert_to_f32 = False  # parts are merged in float64
    try:
        with ring_attention.on_cpu(), context_parallel(mesh, **given):
            yield
    finally:
        options.convert_to_f32 = True


WAYS = {
    "fully_shard": Way(_shard(2), _own_rows),
    "fully_shard with replicas": Way(_shard(2, 1), _own_rows),
    "tensor parallel": Way(_split_tensors, around=lambda batch: loss_parallel()),
    "context parallel": Way(_shard(2), around=_split_sequence),
}


@dataclass
class Trained:
    """What training gave: losses and the gradients of each step, by parameter; and the model."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    net: Any = None

    @property
    def parameters(self) -> Tensors:
        return {name: whole(p) for name, p in self.net.named_parameters()}


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def batch_of(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (BATCH, LENGTH), generator=draw)
    return [ids, torch.arange(LENGTH).repeat(BATCH, 1), ids.roll(-1, 1)]


def model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def train(net: Net, call: Any, optimizer: torch.optim.Optimizer, way: Way, steps: range) -> Trained:
    """Losses and gradients of steps; of a rank's part of the batch, the mean of both ranks."""
    found = Trained(net=net)
    for n in steps:
        batch = [part.clone() for part in way.own(batch_of(n))]
        with way.around(batch):
            ids, positions, targets = batch
            loss = loss_of(call(ids, positions), targets)
            loss.backward()
        loss = whole(loss)
        if way.own is not _alone:
            dist.all_reduce(loss)
            loss /= 2
        found.losses.append(loss)
        found.gradients.append({name: whole(p.grad) for name, p in net.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return found


def _alone(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    return batch


ALONE = Way(lambda net: None, _alone)


def divided(way: Way, how: str, seed: int = 0) -> tuple[Net, Any]:
    """A divided model, and its callable."""
    net = model(seed)
    way.divide(net)
    if how == "one rank" and dist.get_rank():
        return net, net
    if how != "blocks":
        return net, dynamotor.compile(net)
    for name, block in net.blocks.items():
        net.blocks[name] = dynamotor.compile(block)
    return net, net


def compared(rank: int, name: str, how: str, folder: str) -> dict[str, Any]:
    """How far three steps are from those of the whole model trained alone, by kind of tensors; a checkpoint
    behind the second one is read into the whole model, and into another divided one for the third step.
    """
    dynamotor.reset()
    way, alone = WAYS[name], model()
    own = optimizer_of(alone)
    want = train(alone, alone, own, ALONE, range(2))
    before = counters["capture"]["graphs"]
    net, call = divided(way, how)
    optimizer = optimizer_of(net)
    got = train(net, call, optimizer, way, range(2))
    found = {"losses": worst(got.losses, want.losses), "parameters": apart(got.parameters, want.parameters)}
    found["gradients"] = max(map(apart, got.gradients, want.gradients))
    graphs, left = counters["capture"]["graphs"] - before, dict(counters["fallback"])
    save(net, optimizer, folder)
    found["checkpoint"] = apart(read_alone(folder), want.parameters)
    again, call = divided(way, how, seed=1)
    optimizer = optimizer_of(again)
    load(again, optimizer, folder)
    got = train(again, call, optimizer, way, range(2, 3))
    want = train(alone, alone, own, ALONE, range(2, 3))
    found["behind a checkpoint"] = apart(got.parameters, want.parameters)
    return {"found": found, "graphs": graphs, "left": left}


def worst(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))


def apart(got: Tensors, want: Tensors) -> float:
    """How far tensors are apart, each relative to its largest number."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return worst(list(got.values()), [want[name] for name in got])


# Regions that change ops of DTensors for a while -----------------------------------------------------
def regions(rank: int) -> dict[str, Any]:
    """Attention in and out of `context_parallel`, with and without balanced loads, compiled once for each."""
    dynamotor.reset()
    torch.manual_seed(0)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled, options = dynamotor.compile(attend), ring_attention.ring._cp_options
    found: dict[str, Any] = {"worst": 0.0}
    for balanced in (True, False, True, False):
        options.enable_load_balance = balanced
        before = counters["capture"]["graphs"]
        for _ in range(2):
            q, k, v = torch.randn(3, 2, 4, LENGTH, HEAD).double()
            with _split_sequence([q, k, v]):
                found["worst"] = max(found["worst"], worst([compiled(q, k, v)], [attend(q, k, v)]))
            alone = torch.randn(3, 2, 4, LENGTH // 2, HEAD).double()
            found["worst"] = max(found["worst"], worst([compiled(*alone)], [attend(*alone)]))
        found.setdefault("graphs", []).append(counters["capture"]["graphs"] - before)
    options.enable_load_balance = True
    return found


def beside_eager(rank: int) -> float:
    """How far results and gradients of two attentions are from those of one process, where the first rank alone
    compiles.
    """
    dynamotor.reset()
    torch.manual_seed(0)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        once = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return nn.functional.scaled_dot_product_attention(once, k.sin(), v.cos(), is_causal=True)

    call = attend if rank else dynamotor.compile(attend)
    given = [torch.randn(2, 4, LENGTH, HEAD).double().requires_grad_() for _ in range(3)]
    out = attend(*given)
    want = [out.detach(), *torch.autograd.grad(out.square().sum(), given)]
    parts = [x.detach().clone() for x in (*given, *want)]
    ring = init_device_mesh("cpu", (2,))
    options = ring_attention.ring._cp_options
    options.convert_to_f32 = False
    with ring_attention.on_cpu(), context_parallel(ring, buffers=parts, buffer_seq_dims=[2] * len(parts)):
        own = [x.clone().requires_grad_() for x in parts[:3]]
        out = call(*own)
        got = [out.detach(), *torch.autograd.grad(out.square().sum(), own)]
        apart = worst(got, parts[3:])
    options.convert_to_f32 = True
    return apart


def losses(rank: int) -> list[tuple[Any, Any]]:
    """The placements of a loss in `loss_parallel` and out of it, compiled and in eager."""
    dynamotor.reset()
    mesh = init_device_mesh("cpu", (2,))

    def log_softmax(x: DTensor) -> Any:
        return nn.functional.log_softmax(x, -1)

    compiled, found = dynamotor.compile(log_softmax), []
    for _ in range(2):
        x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)])
        with loss_parallel():
            found.append((compiled(x), log_softmax(x)))
        found.append((compiled(x), log_softmax(x)))
    return [(a.placements == b.placements, worst([whole(a)], [whole(b)])) for a, b in found]


# Checkpoints ------------------------------------------------------------------------------------------------
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # groups of stages would overwrite each other's


def save(net: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, state = get_state_dict(net, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(net: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, state = get_state_dict(net, optimizer, options=FLAT)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state, options=FLAT)


def read_alone(folder: str) -> Tensors:
    """The parameters of a checkpoint, read into the whole model."""
    net = model(seed=2)
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["model"])
    return {name: p.detach() for name, p in net.named_parameters()}


# Pipelines --------------------------------------------------------------------------------------------------
SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
PARTS = 4  # of a batch


def pipelined(rank: int, name: str, folder: str) -> dict[str, Any]:
    """The same of two compiled stages: a rank has one."""
    dynamotor.reset()
    alone = model()
    own = optimizer_of(alone)
    want = train(alone, alone, own, ALONE, range(2))
    before = counters["capture"]["graphs"]
    net = model().half(rank)
    optimizer, step = _pipeline(rank, name, net)
    losses: list[torch.Tensor] = []
    found: dict[str, float] = {}
    for n in range(2):
        losses += step(n)
        grads = {key: whole(p.grad) for key, p in net.named_parameters()}
        there = {key: grad for key, grad in want.gradients[n].items() if key in grads}
        found["gradients"] = max(found.get("gradients", 0.0), apart(grads, there))
        optimizer.step()
        optimizer.zero_grad()
    if losses:
        found["losses"] = worst(losses, want.losses)
    graphs, left = counters["capture"]["graphs"] - before, dict(counters["fallback"])
    save(net, optimizer, folder)
    found["checkpoint"] = apart(read_alone(folder), want.parameters)
    again = model(seed=1).half(rank)
    optimizer, step = _pipeline(rank, name, again)
    load(again, optimizer, folder)
    step(2)
    optimizer.step()
    want = train(alone, alone, own, ALONE, range(2, 3))
    there = {key: value for key, value in want.parameters.items() if key in dict(again.named_parameters())}
    found["behind a checkpoint"] = apart(Trained(net=again).parameters, there)
    return {"found": found, "graphs": graphs, "left": left}


def _pipeline(
    rank: int, name: str, net: Net
) -> tuple[torch.optim.Optimizer, Callable[[int], list[torch.Tensor]]]:
    """An optimizer, and a step that gives the loss on the last rank."""
    stage = PipelineStage(dynamotor.compile(net), rank, 2, torch.device("cpu"))
    schedule = SCHEDULES[name](stage, PARTS, loss_fn=loss_of)

    def step(n: int) -> list[torch.Tensor]:
        ids, positions, targets = batch_of(n)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(ids, positions)
        else:
            schedule.step(target=targets, losses=losses)
        return [torch.stack(losses).mean().detach()] if losses else []

    return optimizer_of(net), step
