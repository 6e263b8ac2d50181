"""What tensors over a mesh say of themselves, and how parts are read and written, on four forced CPU devices."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="jax is not installed")

from children import run_forked  # noqa: E402

PROGRAM = """
    import torch, torch.nn as nn
    import dynamotor.xla.start
    import dynamotor.xla.distributed.spmd as xs
    from dynamotor.xla import _XLAC, sync
    from dynamotor.xla.transfer import array
    mesh = xs.Mesh(range(4), (2, 2), ("data", "model"))
    x = torch.arange(32.0).reshape(8, 4)
"""


def run(code: str) -> str:
    done = run_forked(PROGRAM + code, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_layout_in_words_lists_the_devices() -> None:
    run("""
    words = lambda spec, m=mesh: xs.mark_sharding(x.to("xla"), m, spec).sharding_spec
    assert words(("data", None)) == "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"
    assert words((1, 0)) == "{devices=[2,2]0,2,1,3}" and words((None, None)) == "{replicated}"
    assert words((0, None), xs.Mesh([3, 2, 1, 0], (4,))) == "{devices=[4,1]3,2,1,0}"
    y = x.to("xla") * 2
    assert _XLAC._get_xla_sharding_spec(y) == "" and _XLAC._get_xla_sharding_type(y) is None
    assert "mul" in _XLAC._get_xla_tensor_debug_info(y)
    xs.mark_sharding(y, mesh, (("model", "data"), None))     # not computed yet
    assert y.sharding_spec == "{devices=[4,1]0,2,1,3}" and torch.equal(y.cpu(), x * 2)
    about = _XLAC._get_xla_tensor_debug_info(y)
    assert "Data Device: SPMD:0" in about and "OpSharding: {devices=[4,1]0,2,1,3}\\n  NumShards: 4" in about
    """)


def test_marked_tensors_are_sharded_tensors_and_know_their_mark() -> None:
    run("""
    plain, marked = x.to("xla"), xs.mark_sharding(x.to("xla"), mesh, (0, None))
    assert isinstance(marked, xs.XLAShardedTensor) and not isinstance(plain, xs.XLAShardedTensor)
    assert not isinstance(x, xs.XLAShardedTensor) and xs.wrap_if_sharded(marked) is marked
    assert marked.mesh_shape == (2, 2) and marked.partition_spec == (0, None) and plain.mesh_shape is None
    leaf = xs.XLAShardedTensor(plain, requires_grad=True)
    leaf.sum().backward()
    assert torch.equal(leaf.grad.cpu(), torch.ones_like(x))
    wrapped = xs.wrap_as_sharded_tensor(plain, (4,), (None, 0))
    assert wrapped is plain and plain.sharding_spec == "{devices=[1,4]0,1,2,3}"
    """)


def test_parts_are_copies_that_can_be_loaded() -> None:
    run("""
    t = xs.mark_sharding(x.to("xla"), mesh, (None, "model"))
    parts = t.local_shards
    assert [p.replica_id for p in parts] == [0, 0, 1, 1] and parts[1].indices == [slice(0, 8, 1), slice(2, 4, 1)]
    assert torch.equal(parts[1].data, x[parts[1].indices]) and torch.equal(parts[1].unpadded_data, parts[3].data)
    for p in parts: p.data *= -1
    assert torch.equal(t.cpu(), x)
    t.load_local_shards_(parts)
    assert torch.equal(t.cpu(), -x) and t.sharding_spec == "{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}"
    whole = xs.mark_sharding(x.to("xla"), mesh, (None, None))
    assert [p.indices for p in whole.local_shards] == [...] * 4
    for wrong in (lambda: t.load_local_shards_(parts[:-1]), lambda: whole.load_local_shards_(whole.local_shards)):
        try: wrong()
        except RuntimeError as error: assert "DM649" in str(error)
        else: raise AssertionError
    """)


def test_a_tensor_is_made_of_parts_and_padding_is_cut_off() -> None:
    run("""
    row = xs.Mesh(range(4), (4,))
    make, sharding = _XLAC._global_tensor_from_cpu_shards, row.get_op_sharding((0,))
    parts = [torch.arange(2) + 2 * i for i in range(4)]
    assert make(parts, sharding).tolist() == list(range(8)) and make(parts, sharding, (5,)).tolist() == list(range(5))
    assert make(parts, sharding).sharding_spec == "{devices=[4]0,1,2,3}"
    for shape in ((4,), (9,), (2, 4)):
        try: make(parts, sharding, shape)
        except RuntimeError: pass
        else: raise AssertionError(shape)
    """)


def test_placements_and_redistribution() -> None:
    run("""
    from torch.distributed.tensor import Partial, Replicate, Shard
    t = xs.mark_sharding(x.to("xla"), mesh, ("model", None))
    assert t.placements == (Replicate(), Shard(0)) and t._spec.mesh.shape == (2, 2) and t._spec is t._cached_spec
    copy = t.redistribute(mesh, [Shard(1), Shard(0)], async_op=True)
    assert copy.partition_spec == (1, 0) and copy.sharding_spec == "{devices=[2,2]0,2,1,3}"
    assert t.sharding_spec == "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"   # the copy's data was shared
    assert t.redistribute(t._spec.mesh, [Shard(0), Replicate()]) is t and t.partition_spec == (0, None)
    assert torch.equal(t.cpu(), x) and torch.equal(copy.cpu(), x)
    for placements, kind in (([Shard(2), Shard(0)], IndexError), ([Shard(0)], ValueError), ([Partial(), Shard(0)], NotImplementedError)):
        try: t.redistribute(mesh, placements)
        except kind: pass
        else: raise AssertionError(kind)
    try: (t + t).placements
    except ValueError as error: assert "mark_sharding" in str(error)
    else: raise AssertionError
    """)


def test_annotations_take_effect_with_the_next_graph() -> None:
    run("""
    t = xs.mark_sharding(x.to("xla"), mesh, ("data", None))
    xs.annotate_custom_sharding(t, mesh, (None, "model"))
    assert t.sharding_spec == "{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}" and torch.equal(t.cpu(), x)
    a, b = xs.shard_as({"a": xs.mark_sharding(x.to("xla"), mesh, (0, 1))}, {"a": x.to("xla") + 1})
    sync.sync()
    assert a["a"].sharding_spec == b["a"].sharding_spec == "{devices=[2,2]0,1,2,3}" and torch.equal(b["a"].cpu(), x + 1)
    words = (list(range(4)), [2, 2], str(mesh.axis_names), "('data', 1)")
    named = torch.ops.xla.dynamo_mark_sharding(x.to("xla"), *words)
    assert named.sharding_spec == "{devices=[2,2]0,1,2,3}"
    from torch._functorch.aot_autograd import aot_function
    seen = []
    f = aot_function(lambda v: xs.mark_sharding_with_gradients(v.sin(), mesh, (0, 1)) * 2, lambda gm, _: seen.append(gm) or gm)
    v = x.to("xla").requires_grad_()
    f(v).sum().backward()
    torch.testing.assert_close(v.grad.cpu(), 2 * x.cos())
    assert "sharding_constraint" in seen[0].code
    """)


def test_programs_see_one_device_in_spmd_mode() -> None:
    run("""
    import torch.distributed as dist, dynamotor.xla.distributed.xla_backend
    from dynamotor.xla import runtime as xr
    from dynamotor.xla.core import xla_model as xm
    from dynamotor.xla.debug import metrics as met
    t = xs.mark_sharding(x.to("xla"), mesh, (0, 1))
    assert xm.get_xla_supported_devices() == ["xla:0"] and xr.global_device_count() == 1
    assert xr.global_runtime_device_count() == 4 and xm.xla_replication_devices(["xla:0"]) == ["CPU:0"]
    met.clear_all()
    (t + 1).cpu()
    assert met.metric_data("ExecuteReplicatedTime")[0] == 1
    try: dist.init_process_group("xla", init_method="xla://")
    except AssertionError as error: assert "DM649" in str(error)
    else: raise AssertionError
    """)


def test_meshes_without_names_and_wrong_ones() -> None:
    run("""
    plain = xs.Mesh(range(4), (2, 2))
    assert plain.axis_names is None and dict(plain.shape()) == {0: 2, 1: 2} and plain.get_jax_mesh().size == 4
    again = xs.Mesh.from_str(str(mesh))
    assert again.axis_names == mesh.axis_names and again.mesh_shape == (2, 2) and xs.Mesh.from_str("no") is None
    for wrong in ((range(4), (2, 2), ("a", "a")), (range(4), (2, 2), ("a",)), ([0, 0, 1, 2], (4,)), (range(3), (4,))):
        try: xs.Mesh(*wrong)
        except (AssertionError, ValueError) as error: assert "must" in str(error), error
        else: raise AssertionError(wrong)
    """)


def test_loaders_lay_named_parts_of_a_batch_out() -> None:
    run("""
    from dynamotor.xla.distributed.parallel_loader import MpDeviceLoader
    row, batches = xs.get_1d_mesh("x"), [{"a": x, "b": x.sum(1)}]
    load = lambda batches, how: next(iter(MpDeviceLoader(batches, "xla", input_sharding=how)))
    both = {"a": xs.ShardingSpec(row, ("x", None)), "b": xs.ShardingSpec(row, (None,))}
    batch = load(batches, both)
    assert batch["a"].sharding_spec == "{devices=[4,1]0,1,2,3}" and batch["b"].sharding_spec == "{replicated}"
    odd = xs.ShardingSpec(row, ("x", None), minibatch=True)
    for how, given, kind in ((both, [x], ValueError), ({"a": both["a"]}, batches, KeyError), (odd, [x[:3]], RuntimeError)):
        try: load(given, how)
        except kind: pass
        else: raise AssertionError(kind)
    """)


def test_fsdp_wraps_the_submodules_that_a_policy_chooses() -> None:
    run("""
    import functools
    from dynamotor.xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from dynamotor.xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDP
    row = xs.Mesh(range(4), (4, 1), ("fsdp", "tensor"))
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    want = net(x)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    model = FSDP(net, mesh=row, auto_wrap_policy=policy)
    assert [type(part) for part in model.module] == [FSDP, nn.Tanh, FSDP]
    torch.testing.assert_close(model(x.to("xla")).cpu(), want)
    assert model[0].weight.sharding_spec == "{devices=[4,1]0,1,2,3}"
    kept = nn.Linear(4, 8).to("xla")
    xs.mark_sharding(kept.weight, row, (None, "fsdp"))
    assert FSDP(kept, mesh=row).weight.partition_spec == (None, "fsdp")
    for mesh in (None, xs.Mesh(range(4), (4,), ("data",))):
        try: FSDP(nn.Linear(2, 2), mesh=mesh)
        except ValueError as error: assert "DM649" in str(error)
        else: raise AssertionError
    """)
