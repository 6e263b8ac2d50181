"""What 64 ranks would send for a sharded model, and in which order, planned in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fsdp_programs import Net, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dynamotor
from bench import ddp_plan
from dynamotor.base.events import Event, collect
from dynamotor.distributed.shard_ops import shard_gather, shard_weights

RANKS = 64


@pytest.fixture
def many_ranks() -> Iterator[None]:
    ddp_plan.fake_group(RANKS)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def step(many_ranks: None) -> tuple[nn.Module, list[Event]]:
    dynamotor.reset()
    model = Net()
    shard(model, init_device_mesh("cpu", (RANKS,)))
    run = dynamotor.compile(model, backend="aot_eager")
    with collect() as events:
        run(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    return model, events


def padded(module: nn.Module) -> int:
    """Bytes of a module's parameters, each with as many rows as a multiple of the ranks."""
    return sum(-(-p.shape[0] // RANKS) * RANKS * p[0].numel() * p.element_size() for p in module.parameters())


def test_each_group_is_sent_once_a_pass(step: tuple[nn.Module, list[Event]]) -> None:
    model, events = step
    sent = [(e.data["what"], e.data["nbytes"]) for e in events if e.kind == "shards"]
    block, rest = padded(model.blocks[0]), padded(model.embed) + padded(model.head)
    forward = [("gather", rest), *[("gather", block)] * 3]
    backward = ["gather", "gather", "reduce", "gather", "reduce", "reduce", "reduce"]
    assert sent[:4] == forward
    assert sent[4:] == [*((what, block) for what in backward[:-1]), ("reduce", rest)]


def test_a_gather_starts_before_the_layer_that_precedes_its_use(step: tuple[nn.Module, list[Event]]) -> None:
    _, events = step
    graphs = {e.data["stage"]: e.data["graph"] for e in events if e.kind == "aten_graph"}
    for stage, of_first_layer in (("forward", 1), ("backward", 0)):
        calls = [n for n in graphs[stage].graph.nodes if n.op == "call_function"]
        starts = [i for i, n in enumerate(calls) if n.target is shard_gather]
        waits = [i for i, n in enumerate(calls) if n.target is shard_weights]
        products = [
            i
            for i, n in enumerate(calls)
            if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        ]
        for k in range(of_first_layer, len(starts) - 1):  # the next one is on its way while this one computes
            between = [i for i in products if starts[k + 1] < i < waits[k + 1]]
            assert len(between) >= 2, (stage, k)


def test_shards_have_gradients_of_their_sizes(step: tuple[nn.Module, list[Event]]) -> None:
    model, _ = step
    for p in model.parameters():
        assert p.grad is not None and p.grad.placements == p.placements
        assert p.grad.to_local().shape == p.to_local().shape and p.grad.dtype is p.dtype
