"""What later versions of torch_xla have under these names: loops, jax functions, precision, DLPack, FSDP by
sharding.
"""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed")

from children import run_forked  # noqa: E402

from dynamotor.base.errors import XlaError  # noqa: E402
from dynamotor.xla import backends  # noqa: E402
from dynamotor.xla.core.xla_builder import call_jax  # noqa: E402
from dynamotor.xla.experimental.fori_loop import fori_loop, while_loop  # noqa: E402
from dynamotor.xla.utils import dlpack  # noqa: E402
from dynamotor.xla.utils.checkpoint import checkpoint  # noqa: E402


def test_loops_run_as_often_as_the_data_say():
    step = torch.tensor([0.3, 0.7], device="xla")

    def run(start, limit):
        return while_loop(
            lambda i, x, limit: (i < limit) & (x.sum() < 100),
            lambda i, x, limit: (i + 1, x * 1.7 + step),
            (torch.tensor(start, device="xla"), torch.ones(2, device="xla")),
            (torch.tensor(limit, device="xla"),),
        )

    for start, limit in ((0, 3), (2, 3), (5, 3), (0, 1000)):
        i, x = start, torch.ones(2)
        while i < limit and x.sum() < 100:
            i, x = i + 1, x * 1.7 + torch.tensor([0.3, 0.7])
        found_i, found_x = run(start, limit)
        assert found_i.item() == i
        torch.testing.assert_close(found_x.cpu(), x)
    assert fori_loop(2, 5, lambda i, value: value * i, torch.tensor(1, device="xla")).item() == 24
    with pytest.raises(XlaError, match="DM671"):
        while_loop(lambda x: x.sum() < 3, lambda x: (x.double(),), (torch.ones(2, device="xla"),))


def test_precision_arrays_and_checkpoints_have_their_names():
    before = torch.get_float32_matmul_precision()
    try:
        for name in ("default", "high", "highest"):
            backends.set_mat_mul_precision(name)
            assert backends.get_mat_mul_precision() == name
    finally:
        torch.set_float32_matmul_precision(before)
    assert dlpack.from_dlpack(jax.numpy.arange(3)).tolist() == [0, 1, 2]
    assert jax.dlpack.from_dlpack(torch.ones(2, device="xla") + 1).tolist() == [2.0, 2.0]
    x = torch.ones(2, device="xla", requires_grad=True)
    checkpoint(lambda t: call_jax(jax.numpy.square, (t,)), x, use_reentrant=False).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


@pytest.mark.slow
def test_fsdp_over_four_devices_trains_as_one_device():
    """Losses and parameters are those of one device; parameters and optimizer state are divided."""
    done = run_forked(
        """
    import copy, torch, torch.nn as nn
    import dynamotor.xla.start
    import dynamotor.xla.distributed.spmd as xs
    from dynamotor.xla import sync
    from dynamotor.xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDP
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(24, 4))
    reference = copy.deepcopy(model.double())
    mesh = xs.Mesh(range(4), (4,), ("fsdp",))
    model = FSDP(model.to("xla"), mesh=mesh)
    for p in model.parameters():
        assert xs.XLAShardedTensor(p).sharding_type == "TILED", p.shape
    ours, theirs = torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(reference.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        x, y = torch.randn(8, 3, 8, dtype=torch.float64), torch.randint(0, 4, (8,))
        for net, optimizer, where in ((model, ours, "xla"), (reference, theirs, "cpu")):
            data, target = x.to(where), y.to(where)
            if where == "xla":
                xs.mark_sharding(data, mesh, ("fsdp", None, None))
            loss = nn.functional.cross_entropy(net(data), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sync.sync()
            losses.append(loss.item())
    torch.testing.assert_close(losses[::2], losses[1::2], rtol=1e-9, atol=1e-9)
    for mine, expected in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(mine.detach().cpu(), expected.detach(), rtol=1e-8, atol=1e-8)
        assert xs.XLAShardedTensor(mine.detach()).sharding_type == "TILED"
    print("done")
    """,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


def test_names_that_are_said_not_to_be_there_are_not():
    text = (Path(__file__).parents[2] / "docs/leaving-torch-xla.md").read_text()
    module, seen = "", 0
    for row in text.partition("## Names that are not there")[2].splitlines():
        if not row.startswith("| "):
            continue
        first, second, _ = row.strip()[1:-1].split("|")
        modules, names = re.findall(r"`([\w.]+)`", first), re.findall(r"`([\w.]+)`", second)
        module = modules[-1] if modules else module
        if module == "_XLAC":
            continue
        for name in [f"{module}.{name}" for name in names] or modules:
            home, _, last = name.rpartition(".")
            package = f"dynamotor.xla.{home}"
            try:
                there = hasattr(importlib.import_module(package), last) or importlib.util.find_spec(
                    f"{package}.{last}"
                )
            except ModuleNotFoundError:
                there = False
            assert not there, name
            seen += 1
    assert seen > 25
