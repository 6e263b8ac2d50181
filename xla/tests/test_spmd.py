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
    assert info.partition_spec == ("data", "model") and info.sharding_type == "TILED" and info.sharding_spec == "{devices=[2,2]0,1,2,3}"
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
                  lambda: xs.mark_sharding(torch.ones(2), mesh, ("data",)),
                  lambda: xs.mark_sharding(x, xs.Mesh(range(8), (8,)), (0, None))):
        try:
            wrong()
        except RuntimeError as error:
            assert "DM649" in str(error), error
        else:
            raise AssertionError("no error")
    assert x.sum().item() == 18
    """)


def test_compiled_models_and_whole_steps_train_as_the_lazy_device() -> None:
    """Parameters are laid out; the batch is, too. A program is compiled for each way that its inputs are laid out."""
    run("""
    import dynamotor, dynamotor.xla as x
    def train(wrap):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to("xla")
        xs.mark_sharding(m[0].weight, mesh, ("model", None)); xs.mark_sharding(m[2].weight, mesh, (None, "model"))
        o = torch.optim.AdamW(m.parameters(), 1e-2)
        step, losses = wrap(m, o), []
        for i in range(3):
            batch = xs.mark_sharding(torch.randn(8, 8).to("xla"), mesh, ("data", None))
            losses.append(step(batch).item())
        assert xs.XLAShardedTensor(m[0].weight.detach()).partition_spec == ("model", None)
        return losses
    def by_hand(f, o):
        def step(batch):
            loss = f(batch).square().mean(); loss.backward(); o.step(); o.zero_grad(); sync.sync()
            return loss
        return step
    lazy = train(by_hand)
    compiled = train(lambda m, o: by_hand(dynamotor.compile(m, backend="xla"), o))
    whole = train(lambda m, o: x.compile_step(m, lambda y: y.square().mean(), o))
    for got in (compiled, whole):
        assert all(abs(a - b) < 1e-5 for a, b in zip(got, lazy)), (got, lazy)
    """)


def test_spmd_mode_that_begins_after_a_program_was_compiled() -> None:
    run("""
    import dynamotor
    f = dynamotor.compile(lambda a: torch.dropout(a * 1.5, 0.5, True) * 2.5, backend="xla")
    a = torch.ones(8, 4, device="xla")
    f(a)
    xs.mark_sharding(a, mesh, ("data", None))
    assert set(f(a).flatten().tolist()) <= {0.0, 7.5} and torch.equal((a + f(a) * 0).cpu(), torch.ones(8, 4))
    """)


def test_sizes_that_the_mesh_does_not_divide_stay_whole() -> None:
    run("""
    w = xs.mark_sharding(torch.arange(21.0).reshape(7, 3).to("xla"), mesh, ("data", None))
    assert xs.XLAShardedTensor(w).sharding_type == "REPLICATED" and w.sum().item() == 210
    v = xs.mark_sharding(torch.ones(7, 4).to("xla"), mesh, ("data", "model"))
    assert xs.XLAShardedTensor(v).partition_spec == (None, "model")
    """)


def test_pytorchs_parallel_styles_lay_parameters_out() -> None:
    run("""
    import dynamotor.xla.runtime as xr
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    dynamotor.xla.install_as_torch_xla(); xr.use_spmd()
    dm = DeviceMesh("xla", list(range(4)))
    m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("xla")
    want = m(torch.ones(4, 8, device="xla")).cpu()
    parallelize_module(m, dm, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    assert torch.allclose(m(torch.ones(4, 8, device="xla")).cpu(), want, atol=1e-6)
    assert xs.XLAShardedTensor(m[0].weight.detach()).sharding_type == "TILED"
    p = nn.Parameter(distribute_tensor(torch.ones(4, 4), dm, [Shard(0)]))
    assert isinstance(p, torch.Tensor) and (p * 2).sum().item() == 32
    double = lambda m, inputs, mesh: (inputs[0] * 2,)
    n = distribute_module(nn.Linear(2, 2, bias=False).to("xla"), dm, None, double, lambda m, out, mesh: out + 1)
    x = torch.ones(1, 2, device="xla")
    assert torch.allclose(n(x), (x * 2) @ n.weight.t() + 1)
    """)


def test_the_fsdp_wrapper_shows_the_modules_attributes_and_moves_it() -> None:
    run("""
    from dynamotor.xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as F
    class M(nn.Module):
        def __init__(self): super().__init__(); self.fc = nn.Linear(8, 8); self.config = 5
        def forward(self, x): return self.fc(x)
    m = F(M(), mesh=xs.Mesh(range(4), (4,), ("fsdp",)))
    assert m.config == 5 and m.fc.weight.device.type == "xla"
    assert m(torch.ones(3, 8, device="xla")).shape == (3, 8)
    try: m.nothing
    except AttributeError: pass
    else: raise AssertionError
    """)
