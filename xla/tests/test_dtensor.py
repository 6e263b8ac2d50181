"""PyTorch's functional collectives, DTensor and parallel plans on two replicas."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
from replicas import run_replicas  # noqa: E402

BEGIN = """
import copy, torch, torch.nn as nn, torch.distributed as dist, dynamotor.xla
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dynamotor.xla.install_as_torch_xla()
dist.init_process_group("xla", init_method="xla://")
mesh = init_device_mesh("xla", (2,), mesh_dim_names=("replicas",))
rank = dist.get_rank()
torch.manual_seed(0)
w, x = torch.randn(4, 6), torch.randn(3, 4)
same = lambda a, b: torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_functional_collectives_stay_on_the_device() -> None:
    program = """
    for group in (dist.group.WORLD, mesh, dist.group.WORLD.group_name):
        one = torch.full((2, 2), rank + 1.0, device="xla")
        both = torch.cat([torch.full((2, 2), 1.0), torch.full((2, 2), 2.0)])
        same(funcol.all_reduce(one, "sum", group), torch.full((2, 2), 3.0))
        same(funcol.all_reduce(one, "avg", group), torch.full((2, 2), 1.5))
        same(funcol.all_gather_tensor(one, 0, group), both)
        same(funcol.reduce_scatter_tensor(both.to("xla"), "sum", 0, group), torch.full((2, 2), 2.0 * (rank + 1)))
        same(funcol.broadcast(one, 1, group), torch.full((2, 2), 2.0))
        same(funcol.all_to_all_single(one, [1, 1], [1, 1], group), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
        a, b = funcol.all_reduce_coalesced([one, one * 2], "max", group)
        same(b, torch.full((2, 2), 4.0))
    from dynamotor.xla import metrics
    assert not [name for name in metrics.all_counters() if name.startswith("_c10d")]
    """
    run_replicas(BEGIN + _plain(program))


def test_dtensors_equal_whole_tensors() -> None:
    program = """
    a, b = distribute_tensor(x.to("xla"), mesh, [Replicate()]), distribute_tensor(w.to("xla"), mesh, [Shard(1)])
    assert type(a) is DTensor and b.to_local().shape == (4, 3) and b.to_local().device.type == "xla"
    same((a @ b).relu().full_tensor(), (x @ w).relu())
    rows = b.redistribute(mesh, [Shard(0)])
    assert rows.to_local().shape == (2, 6)
    same(rows.full_tensor(), w)
    partial = DTensor.from_local(w.to("xla"), mesh, [Partial()])
    same(partial.full_tensor(), 2 * w)
    same(partial.redistribute(mesh, [Shard(0)]).full_tensor(), 2 * w)
    layer = distribute_module(nn.Linear(4, 2).to("xla"), mesh)
    assert type(layer.weight.data) is DTensor
    """
    run_replicas(BEGIN + _plain(program))


@pytest.mark.slow
def test_a_tensor_parallel_plan_trains_as_one_process_does() -> None:
    program = """
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    host = copy.deepcopy(model)
    model = parallelize_module(model.to("xla"), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, host))
    for _ in range(3):
        loss, expected = model(x.to("xla")).square().mean(), host(x).square().mean()
        loss.backward(), expected.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        same(loss, expected)
    for p, q in zip(model.parameters(), host.parameters()):
        same(p.full_tensor() if isinstance(p, DTensor) else p, q)
    """
    run_replicas(BEGIN + _plain(program))


def _plain(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())
