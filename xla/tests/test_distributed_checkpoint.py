"""A checkpoint of tensors in parts: saved on four devices, it loads on two, and on none of xla's."""

import pytest

pytest.importorskip("jax", reason="jax is not installed")

from children import run_forked  # noqa: E402

MODEL = """
import sys, torch, torch.nn as nn, torch.distributed.checkpoint as dcp
import dynamotor.xla
import dynamotor.xla.distributed.spmd as xs
from dynamotor.xla import sync
from dynamotor.xla.experimental.distributed_checkpoint import CheckpointManager, SPMDLoadPlanner, SPMDSavePlanner, prime_optimizer

def make(seed, devices):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to("xla")
    mesh = xs.Mesh(range(devices), (devices,), ("fsdp",))
    for p in model.parameters():
        xs.mark_sharding(p, mesh, ("fsdp", *[None] * (p.dim() - 1)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)

def step(model, optimizer, x):
    loss = model(x.to("xla")).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad(); sync()
    return loss.item()

def state(model, optimizer):
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "note": 7}
"""


@pytest.mark.slow
def test_saved_on_four_devices_loads_on_two(tmp_path):
    saved = run_forked(
        MODEL
        + """
model, optimizer = make(0, 4)
torch.manual_seed(5); batches = torch.randn(4, 6, 8)
for x in batches[:2]:
    step(model, optimizer, x)
manager = CheckpointManager(sys.argv[1], 10, max_to_keep=2)
assert not manager.save(3, state(model, optimizer)) and manager.save(0, state(model, optimizer)) and manager.save_async(10, state(model, optimizer))
manager.join()
assert manager.all_steps() == [0, 10] and manager.save(20, state(model, optimizer)) and manager.all_steps() == [10, 20]
assert len(dcp.FileSystemReader(sys.argv[1] + "/20").read_metadata().state_dict_metadata["model.0.weight"].chunks) == 4
torch.save([[step(model, optimizer, x) for x in batches[2:]], {k: v.cpu() for k, v in model.state_dict().items()}], sys.argv[1] + "/expected")
print("done")
""",
        str(tmp_path),
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert "done" in saved.stdout, saved.stderr
    loaded = run_forked(
        MODEL
        + """
losses, expected = torch.load(sys.argv[1] + "/expected")
for folder in (10, 20):
    model, optimizer = make(1, 2)
    before = [p.detach().cpu() for p in model.parameters()]
    prime_optimizer(optimizer)
    torch.testing.assert_close([p.detach().cpu() for p in model.parameters()], before)
    into = state(model, optimizer)
    CheckpointManager(sys.argv[1], 10).restore(folder, into)
    model.load_state_dict(into["model"]); optimizer.load_state_dict(into["optim"])
    assert into["note"] == 7
    assert all(xs.XLAShardedTensor(p.detach()).sharding_type == "TILED" for p in model.parameters())
    torch.manual_seed(5); batches = torch.randn(4, 6, 8)
    torch.testing.assert_close([step(model, optimizer, x) for x in batches[2:]], losses)
    torch.testing.assert_close({k: v.cpu() for k, v in model.state_dict().items()}, expected)
print("done")
""",
        str(tmp_path),
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert "done" in loaded.stdout, loaded.stderr


def test_planners_take_divided_tensors_by_parts(tmp_path):
    done = run_forked(
        """
import sys, torch, torch.distributed.checkpoint as dcp
import dynamotor.xla.start
import dynamotor.xla.distributed.spmd as xs
from dynamotor.xla.experimental.distributed_checkpoint import CheckpointManager, SPMDLoadPlanner, SPMDSavePlanner
row, x = xs.Mesh(range(4), (4,), ("x",)), torch.arange(32.0).reshape(8, 4)
state = lambda spec, value: {"w": xs.mark_sharding(value.to("xla"), row, spec), "b": torch.ones(3).to("xla")}
planner = SPMDSavePlanner()
planner.set_up_planner(state(("x", None), x), is_coordinator=True)
assert list(planner.sharded_state_dict) == ["w"] and list(planner.unsharded_state_dict) == ["b"]
assert sorted(item.index.index for item in planner.create_local_plan().items if item.index.fqn == "w") == [0, 1, 2, 3]
manager = CheckpointManager(sys.argv[1], 1, max_to_keep=2)
for step in (3, 4, 1): manager.save(step, state(("x", None), x * step))
assert manager.all_steps() == [1, 4]                    # the one written first is gone, not the lowest
target, reader = state((None, "x"), -x), dcp.FileSystemReader(sys.argv[1] + "/4")
planner = SPMDLoadPlanner()
planner.set_up_planner(target, reader.read_metadata(), True)
assert len([item for item in planner.create_local_plan().items if item.dest_index.fqn == "w"]) == 16
manager.restore(4, target)
assert torch.equal(target["w"].cpu(), x * 4) and target["w"].sharding_spec == "{devices=[1,4]0,1,2,3}"
print("done")
""",
        str(tmp_path),
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert "done" in done.stdout, done.stdout + done.stderr
