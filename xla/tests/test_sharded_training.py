"""PyTorch's FSDP2 (`fully_shard`) and FSDP1 on two replicas train as one process does."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
import torch  # noqa: E402
from replicas import run_replicas  # noqa: E402

import dynamotor.xla  # noqa: E402, F401
from dynamotor.extension_api import XlaError  # noqa: E402

PROGRAM = """
import copy, torch, torch.nn as nn, torch.distributed as dist, dynamotor.xla
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, fully_shard
dist.init_process_group("xla", init_method="xla://")
rank, mesh = dist.get_rank(), init_device_mesh("xla", (2,))
torch.manual_seed(0)

def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value

def train(shard, clip):
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    host = copy.deepcopy(model)
    model = shard(model.to("xla"))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, host))
    losses = []
    for step in range(2):
        x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))
        loss, expected = model(x[rank].to("xla")).square().mean(), sum(host(part).square().mean() for part in x) / 2
        loss.backward(), expected.backward()
        clip(model), nn.utils.clip_grad_norm_(host.parameters(), 1.0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        torch.testing.assert_close(total.cpu() / 2, expected.detach(), rtol=1e-4, atol=1e-5)
    return model, host

def second(reshard):
    def shard(model):
        for layer in [layer for layer in model if isinstance(layer, nn.Linear)]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    model, host = train(shard, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    for (name, value), other in zip(model.state_dict().items(), host.state_dict().values()):
        torch.testing.assert_close(whole(value).cpu(), other, rtol=1e-4, atol=1e-5, msg=lambda m: name + m)

def first(strategy):
    train(lambda model: FSDP(model, sharding_strategy=strategy, device_id=torch.device("xla", 0)), lambda model: model.clip_grad_norm_(1.0))

WAY
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "second(True)",
        "second(False)",
        "first(ShardingStrategy.FULL_SHARD)",
        "first(ShardingStrategy.SHARD_GRAD_OP)",
    ],
)
def test_sharded_parameters_train_as_whole_ones(way: str) -> None:
    run_replicas(PROGRAM.replace("WAY", way))


def test_memory_is_given_back_and_taken_again() -> None:
    x = torch.arange(6.0).view(2, 3).to("xla")
    view = x.view(-1)
    storage = x.untyped_storage()
    assert storage is x.untyped_storage() and storage.size() == storage.nbytes() == 24
    assert storage.device.type == "xla" and storage.data_ptr() == 0
    storage.resize_(24)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    storage.resize_(0)
    assert storage.size() == 0
    storage.resize_(24)
    x.copy_(torch.ones(2, 3))
    assert view.tolist() == [1] * 6 and storage.size() == 24
    for wrong, size in ((storage, 12), (view.untyped_storage(), 0)):
        with pytest.raises(XlaError, match="DM619"):
            wrong.resize_(size)
    assert view.tolist() == [1] * 6 and view.untyped_storage().size() == 24
    assert x[1].untyped_storage().size() == 24  # a view of a part has the memory of the whole
