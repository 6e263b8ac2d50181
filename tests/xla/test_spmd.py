"""SPMD over a 2x2 mesh of forced CPU devices, in a process of its own: values are those of one device."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="jax is not installed")

from children import run_forked  # noqa: E402

PROGRAM = """
    import copy, torch, torch.nn as nn
    import dynamotor.xla.start
    import dynamotor.xla.distributed.spmd as xs
    from dynamotor.xla import sync
    from dynamotor.xla.transfer import array
    mesh = xs.Mesh(range(4), (2, 2), ("data", "model"))
"""


def run(code: str) -> str:
    done = run_forked(PROGRAM + code, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_data_is_laid_out_and_values_stay() -> None:
    run("""
    x = torch.arange(32.0).reshape(8, 4)
    a = xs.mark_sharding(x.to("xla"), mesh, ("data", "model"))
    assert {s.data.shape for s in array(a).addressable_shards} == {(4, 2)}
    info = xs.XLAShardedTensor(a)
    assert info.partition_spec == ("data", "model") and info.sharding_type == "TILED" and "'data': 2" in info.sharding_spec
    assert len(info.local_shards) == 4 and torch.equal(info.local_shards[0].data, x[:4, :2])
    assert torch.equal(a.cpu(), x) and isinstance(xs.wrap_if_sharded(a), xs.XLAShardedTensor)
    b = xs.mark_sharding(x.to("xla"), mesh, (("data", "model"), None))
    assert {s.data.shape for s in array(b).addressable_shards} == {(2, 4)}
    c = xs.mark_sharding(x.to("xla"), mesh, (0, None))
    assert xs.XLAShardedTensor(c).sharding_type == "PARTIAL"
    assert torch.equal((a @ b.t() + c.sum() + torch.ones(8, 8, device="xla") * 1.5).cpu(), x @ x.t() + x.sum() + 1.5)
    y = a * 2                       # computed, not yet run
    xs.mark_sharding(y, mesh, (None, "model"))
    assert torch.equal(y.cpu(), x * 2)
    assert {s.data.shape for s in array(y).addressable_shards} == {(8, 2)}
    xs.clear_sharding(a)
    assert xs.XLAShardedTensor(a).sharding_type == "REPLICATED" and torch.equal(a.cpu(), x)
    xs.set_global_mesh(mesh)
    assert xs.get_global_mesh() is mesh and xs.get_1d_mesh("x").shape() == {"x": 4}
    """)


def test_a_sharded_model_trains_as_on_one_device() -> None:
    run("""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 4)).double()
    reference = copy.deepcopy(model)
    model = model.to("xla")
    xs.mark_sharding(model[0].weight, mesh, ("model", None))
    xs.mark_sharding(model[0].bias, mesh, ("model",))
    xs.mark_sharding(model[3].weight, mesh, (None, "model"))
    optimizer, expected = torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(reference.parameters(), lr=0.01)
    for _ in range(4):
        x, y = torch.randn(8, 8).double(), torch.randint(0, 4, (8,))
        data = xs.mark_sharding(x.to("xla"), mesh, ("data", None))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), y.to("xla"))
        loss.backward()
        optimizer.step()
        sync.sync()
        expected.zero_grad()
        wanted = nn.functional.cross_entropy(reference(x), y)
        wanted.backward()
        expected.step()
        assert abs(loss.item() - wanted.item()) < 1e-10
    for got, want in zip(model.parameters(), reference.parameters()):
        assert torch.allclose(got.cpu(), want, atol=1e-10)
    """)


def test_a_loader_lays_its_batches_out() -> None:
    run("""
    from dynamotor.xla.distributed.parallel_loader import MpDeviceLoader
    xs.use_spmd()
    batches = [(torch.arange(16.0).reshape(8, 2) + i, torch.arange(8)) for i in range(3)]
    for i, (x, y) in enumerate(MpDeviceLoader(batches, "xla:0", input_sharding=xs.ShardingSpec(mesh, ("data", None)))):
        assert {s.data.shape for s in array(x).addressable_shards} == {(4, 2)}
        assert len(array(y).devices()) == 4
        assert (x * y[:, None]).sum().item() == (batches[i][0] * batches[i][1][:, None]).sum().item()
    """)


def test_wrong_meshes_and_specs_are_coded_errors() -> None:
    run("""
    x = torch.ones(6, 3, device="xla")
    for wrong in (lambda: xs.Mesh(range(3), (2, 2)), lambda: xs.Mesh(range(4), (2, 2), ("a", "a")), lambda: xs.mark_sharding(x, mesh, ("data",)),
                  lambda: xs.mark_sharding(x, mesh, ("nope", None)), lambda: xs.mark_sharding(x, mesh, ("data", "data")),
                  lambda: xs.mark_sharding(x, mesh, (None, "data")), lambda: xs.mark_sharding(torch.ones(2), mesh, ("data",)),
                  lambda: xs.mark_sharding(x, xs.Mesh(range(8), (8,)), (0, None))):
        try:
            wrong()
        except RuntimeError as error:
            assert "DM649" in str(error), error
        else:
            raise AssertionError("no error")
    assert x.sum().item() == 18
    """)
