"""Parts of torch_xla that programs import by name: operations of values, pure functions, kernels, queues,
plugins, comparisons.
"""

from __future__ import annotations

import importlib
import threading

import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed")

from children import run_forked  # noqa: E402

from dynamotor.base.errors import XlaError  # noqa: E402
from dynamotor.xla import _XLAC, install  # noqa: E402
from dynamotor.xla.core import (  # noqa: E402
    xla_builder as xb,
    xla_model as xm,
    xla_op_registry as xor,
)
from dynamotor.xla.debug import model_comparator, profiler  # noqa: E402
from dynamotor.xla.distributed.data_parallel import DataParallel  # noqa: E402
from dynamotor.xla.distributed.fsdp import consolidate_sharded_model_checkpoints  # noqa: E402
from dynamotor.xla.experimental import (  # noqa: E402
    callback,
    custom_kernel as ck,  # noqa: E402
    plugins,
)
from dynamotor.xla.experimental.assume_pure import PureModule, assume_pure, j2t_autograd  # noqa: E402
from dynamotor.xla.test import test_utils as xtu  # noqa: E402
from dynamotor.xla.utils import closures, keyd_queue, utils  # noqa: E402


def test_every_other_name_of_a_module_leads_to_it():
    package = install.install_as_torch_xla()
    try:
        for alias, real in install._ELSEWHERE.items():
            assert importlib.import_module(f"torch_xla.{alias}") is importlib.import_module(
                f"{package.__name__}.{real}"
            )
    finally:
        install.uninstall()


def test_registered_operations_are_functions_of_values_with_gradients():
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    xa, xb_ = a.detach().to("xla").requires_grad_(), b.to("xla")
    op = xor.register(
        "slice_and_add",
        lambda x, y, dimno=0: x.slice_in_dim(0, 1, dimno) * 2 + y.slice_in_dim(1, 2, dimno).exp(),
    )
    for dim in (0, 1):
        torch.testing.assert_close(
            op(xa, xb_, dimno=dim).cpu(), a.narrow(dim, 0, 1) * 2 + b.narrow(dim, 1, 1).exp()
        )
    op(xa, xb_).sum().backward()
    assert xa.grad.tolist() == [[2.0] * 3, [0.0] * 3]
    many = xor.register(
        "many",
        lambda x, y: (
            (x @ y.transpose((1, 0))).reshape((4,)),
            x.reduce(xb.Op.scalar(None, 0.0), lambda p, q: p + q, (1,)),
            (x < y).select(x, y),
            x.cast(torch.int32),
            xb.Op.concat_in_dim([x, -y], 1),
            x.clamp(xb.Op.scalar(None, 0.0), y.ones_like()),
        ),
    )
    expected = (
        (a @ b.t()).reshape(4),
        a.sum(1),
        torch.minimum(a, b),
        a.int(),
        torch.cat([a, -b], 1),
        a.clamp(0, 1),
    )
    halves = xor.register("halves", lambda x: xb.Op.tuple((x, x.cast(xb.Type.BF16))))
    assert [t.dtype for t in halves(xb_)] == [torch.float32, torch.bfloat16]
    for found, want in zip(many(xa.detach(), xb_), expected):
        torch.testing.assert_close(found.cpu(), want.detach())


def test_computations_branch_and_loop():
    def body(x, limit):
        pair = xb.Op.mkwhile(
            [x, limit], lambda x, limit: x < limit, lambda x, limit: (x * x.scalar_like(2.0), limit)
        )
        grown = pair.get_tuple_element(0)
        return (grown > x).mkconditional([grown, x], lambda g, x: g + x, lambda g, x: g - x)

    solve = xor.register("solve", lambda a, b: a.triangualr_solve(b, True, True, False, False))
    a, b = torch.tensor([[2.0, 0.0], [1.0, 4.0]]), torch.tensor([[2.0], [9.0]])
    assert solve(a.to("xla"), b.to("xla")).tolist() == [[1.0], [2.0]]
    x, limit = torch.tensor(1.5, device="xla"), torch.tensor(20.0, device="xla")
    built = xb.create_computation("grow", body, xb.tensor_shape([x, limit]))
    assert xb.xla_computation_as_func(built)([x, limit]).item() == 24.0 + 1.5
    assert "while" in xb.get_computation_hlo(built)
    assert (xb.tensor_shape(x.expand(3, 2)).sizes, xb.mkshape(torch.float32, [3]).rank) == ((3, 2), 1)
    with pytest.raises(XlaError, match="DM601"):
        xb.create_placeholder_tensor((2, 3), torch.float32).cpu()


def test_pure_functions_are_traced_once_a_kind_of_arguments():
    calls = []

    def function(x, y, power=2):
        calls.append(1)
        return {"out": (x @ y * 0.3).relu() ** power, "same": x}

    pure = assume_pure(function)
    for _ in range(2):
        x, y = torch.randn(3, 4), torch.randn(4, 2)
        given = [t.to("xla").requires_grad_() for t in (x, y)]
        wanted = [t.clone().requires_grad_() for t in (x, y)]
        found, want = pure(*given), function(*wanted)
        (found["out"].sum() + found["same"].sum()).backward()
        (want["out"].sum() + want["same"].sum()).backward()
        torch.testing.assert_close(found["out"].cpu(), want["out"])
        for one, other in zip(given, wanted):
            torch.testing.assert_close(one.grad.cpu(), other.grad)
    assert len(calls) == 3  # one trace, and the two calls on the CPU
    torch.testing.assert_close(pure(x.to("xla"), y.to("xla"), power=3)["out"].cpu(), function(x, y, 3)["out"])
    weight = torch.ones(2, device="xla")
    for impure in (lambda t: t * weight, lambda t: t + torch.rand_like(t)):
        with pytest.raises(XlaError, match="DM669"):
            assume_pure(impure)(torch.ones(2, device="xla"))


def test_pure_modules_see_their_parameters_as_they_are():
    module = torch.nn.Linear(3, 2)
    pure, x = PureModule(torch.nn.Linear(3, 2).to("xla")), torch.randn(4, 3)
    for _ in range(2):
        pure._module.load_state_dict(module.state_dict())
        torch.testing.assert_close(pure(x.to("xla")).cpu(), module(x))
        torch.nn.init.normal_(module.weight)
    torch.testing.assert_close(j2t_autograd(jax.numpy.sin)(x.to("xla")).cpu(), x.sin())


def _attention(q, k, v, seen, scale):
    scores = (q @ k.transpose(-1, -2)) * scale
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


def test_flash_attention_is_attention_with_gradients():
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])
    seen = torch.ones(5, 5, dtype=torch.bool).tril() & (ids[:, None, :, None] == ids[:, None, None, :])
    given = [t.to("xla").requires_grad_() for t in (q, k, v)]
    wanted = [t.requires_grad_() for t in (q, k, v)]
    found = ck.flash_attention(*given, True, ids.to("xla"), ids.to("xla"), 0.5)
    want = _attention(*wanted, seen, 0.5)
    torch.testing.assert_close(found.cpu(), want)
    found.square().sum().backward()
    want.square().sum().backward()
    for one, other in zip(given, wanted):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)


def test_attention_over_pages_finds_the_keys_of_each_sequence():
    k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 4, 8)  # two kv heads, six pages of four tokens
    pages, lengths = torch.tensor([[4, 1, 0], [2, 5, 3]]), torch.tensor([9, 6])
    q, newest = torch.randn(2, 3, 4, 8), torch.tensor([3, 3])
    on = [t.to("xla") for t in (q, k, v, lengths, pages, newest)]
    found = ck.multi_queries_paged_attention(*on).cpu()
    for i, length in enumerate(lengths.tolist()):
        keys, values = (t[:, pages[i]].reshape(2, 12, 8)[:, :length].repeat_interleave(2, 0) for t in (k, v))
        seen = torch.arange(length) <= (length - 3 + torch.arange(3))[:, None]
        torch.testing.assert_close(
            found[i].transpose(0, 1), _attention(q[i].transpose(0, 1), keys, values, seen, 1.0)
        )
    one = ck.paged_attention(q[:, 2].to("xla"), *on[1:5]).cpu()
    torch.testing.assert_close(one, found[:, 2])
    both = (
        torch.stack([k, v], 3).permute(1, 2, 0, 3, 4).reshape(6, 4, 4, 8)
    )  # keys and values of a head in turn
    ragged = torch.cat([q[0], q[1], torch.zeros(2, 4, 8)])
    rest = [t.to("xla") for t in (ragged, both, lengths, pages, torch.tensor([0, 3, 6]), torch.tensor([2]))]
    out = ck.ragged_paged_attention(*rest).cpu()
    torch.testing.assert_close(out[:6], torch.cat([found[0], found[1]]))
    assert not out[6:].any()
    windowed = ck.ragged_paged_attention(*rest, sliding_window=1).cpu()
    last = v[:, pages[0]].reshape(2, 12, 8)[:, 6:9].repeat_interleave(2, 0).transpose(0, 1)
    torch.testing.assert_close(windowed[:3], last)


@pytest.mark.slow
def test_products_by_groups_have_gradients_and_kernels_of_pallas_run():
    lhs, rhs, sizes = torch.randn(6, 3), torch.randn(3, 3, 2), torch.tensor([2, 0, 4])
    given = [t.to("xla").requires_grad_() for t in (lhs, rhs)]
    wanted = [t.requires_grad_() for t in (lhs, rhs)]
    want = torch.cat([part @ m for part, m in zip(wanted[0].split(sizes.tolist()), wanted[1])])
    found = ck.gmm(*given, sizes.to("xla"))
    torch.testing.assert_close(found.cpu(), want)
    turned = ck.gmm(given[0], given[1].transpose(1, 2), sizes.to("xla"), transpose_rhs=True)
    torch.testing.assert_close(turned.cpu(), want)
    (found * found).sum().backward()
    (want * want).sum().backward()
    for one, other in zip(given, wanted):
        torch.testing.assert_close(one.grad.cpu(), other.grad)
    weights = ck.tgmm(given[0].detach().t(), found.detach(), sizes.to("xla"))
    torch.testing.assert_close(weights.cpu() * 2, rhs.grad)

    from jax.experimental import pallas as pl

    def add(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] + y_ref[...]

    def call(x, y):
        return pl.pallas_call(add, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, y)

    kernel = ck.make_kernel_from_pallas(call, lambda x, y: [(x.shape, x.dtype)])
    assert kernel(torch.ones(4, device="xla"), torch.arange(4.0, device="xla")).tolist() == [
        1.0,
        2.0,
        3.0,
        4.0,
    ]


def test_two_runs_are_compared_by_the_names_of_their_tensors(tmp_path):
    for device in ("cpu", "xla"):
        model_comparator.configure(str(tmp_path / device))
        for step in range(2):
            value = torch.ones(2, device=device) * (step + (device == "xla") * step * 1e-3)
            model_comparator.save("hidden", value)
            model_comparator.save("hidden", value * 0, step)
        model_comparator.save(None, torch.zeros(1, device=device))
    text = model_comparator.compare(str(tmp_path / "cpu"), str(tmp_path / "xla"))
    assert "hidden-1.pt" in text and "hidden-0.pt" not in text
    assert model_comparator.compare(str(tmp_path / "cpu"), str(tmp_path / "xla"), rtol=1e-2) == ""
    assert (tmp_path / "xla" / "step-1" / "hidden-0.pt").exists()
    (tmp_path / "cpu" / "hidden-0.pt").unlink()
    assert "hidden-0.pt is only in" in model_comparator.compare(
        str(tmp_path / "cpu"), str(tmp_path / "xla"), rtol=1e-2
    )


def test_queues_and_closures_of_threads():
    queue, keyed = keyd_queue.Queue(maxsize=2), keyd_queue.KeydQueue(maxsize=2)
    writer = threading.Thread(target=lambda: [queue.put(i) for i in range(5)] and queue.close_write())
    writer.start()
    assert [queue.get() for _ in range(6)] == [0, 1, 2, 3, 4, None]
    assert keyed.put("b", 2) and keyed.put("a", 1) and keyed.get("a") == 1
    keyed.close()
    assert keyed.get("b") is None and not keyed.put("c", 3) and not queue.put(1)
    writer.join()
    seen = []
    handler = closures.AsyncClosureHandler()
    handler.run_all([lambda: seen.append(1), lambda: 1 / 0])
    handler._worker.shutdown()
    with pytest.raises(ZeroDivisionError):
        handler.run(lambda: None)
    closures.ClosureHandler().run_all([lambda: seen.append(2)])
    assert seen == [1, 2]


def test_plugins_are_told_to_jax_and_asked_by_name(monkeypatch):
    class Plugin(plugins.DevicePlugin):
        def library_path(self):
            return "/opt/mine.so"

    monkeypatch.setenv("PJRT_NAMES_AND_LIBRARY_PATHS", "")
    monkeypatch.setattr(plugins, "_registered", {})
    mine = Plugin()
    plugins.register_plugin("MINE", mine)
    monkeypatch.setenv("PJRT_DEVICE", "MINE")
    import os

    assert plugins.default() is mine and os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] == "mine:/opt/mine.so"
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert plugins.default().library_path() == "" and not plugins.using_dynamic_plugins()


def test_small_names(tmp_path, capsys):
    x = torch.arange(4.0, device="xla")
    assert callback.on_ready_event(x * 2).wait(30)
    y = x + 1
    xm.optimization_barrier_([y])
    assert y.tolist() == [1.0, 2.0, 3.0, 4.0] and xm.xla_device_kind() == jax.local_devices()[0].device_kind
    assert xm.all_gather_bucketized([x])[0].tolist() == x.tolist()
    outputs = [torch.empty_like(x), torch.empty_like(x)]
    assert xm.all_gather_bucketized([x, x], output=outputs) is outputs
    assert xm.reduce_scatter_bucketized("sum", [x, x + 1], 1.0, 0, 1, output=outputs) is outputs
    assert [t.tolist() for t in outputs] == [x.tolist(), (x + 1).tolist()]
    pending, same, other = x * 3, x * 3, x * 3.5 - 1
    assert _XLAC._check_tensor_need_materialization([pending, x]) == [True, False]
    assert _XLAC._get_graph_hash([pending]) != _XLAC._get_graph_hash([other])
    _XLAC._xla_sync_multi([pending, same, other], [], True)
    assert (
        _XLAC._check_tensor_need_materialization([pending]) == [False]
        and _XLAC._xla_get_tensor_id(pending) != 0
    )
    assert _XLAC._xla_tensors_from_aten([torch.ones(2)], ["xla:0"])[0].tolist() == [1.0, 1.0]
    assert profiler.trace_me("block")(lambda t: t + 1)(1) == 2
    assert utils.flatten_nested_tuple((1, (2, [3]))) == (1, 2, 3) and utils.shape([x, [x]]) == [[4], [[4]]]
    assert len(set(utils.get_free_tcp_ports(2))) == 2 and utils.parallel_work(2, pow, [2, 3], [3, 2]) == [
        8,
        9,
    ]
    assert utils.timed(lambda: 5, "it took ") == 5 and "it took" in capsys.readouterr().err
    with utils.TimedScope("a scope ", printfn=None) as scope:
        assert utils.timed(lambda: 6, printfn=None) == 6 and scope is not None
    arena = xm.ToXlaTensorArena(lambda ts: [t.to("xla") for t in ts], lambda v: isinstance(v, torch.Tensor))
    moved = arena.transform({"a": (torch.ones(2), [torch.zeros(1)]), "b": "text"})
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "xla" and moved["b"] == "text"
    assert _XLAC._get_xla_tensor_dimension_size(torch.nonzero(x), 0).item() == 3
    made = []
    lazy = utils.LazyProperty(lambda: made.append(1) or 7)
    assert (lazy.value, lazy.value, made, utils.list_copy_append([1], 2)) == (7, 7, [1], [1, 2])
    xtu.print_training_update("xla:0", 3, 0.5, 10.0, 9.0, epoch=1)
    xtu.print_test_update("xla:0", 99.0)
    printed = capsys.readouterr().out
    assert "step=3" in printed and "loss=0.50000" in printed and "accuracy=99.0" in printed
    xtu.write_to_summary(xtu.get_summary_writer(None), 1, {"loss": 1.0})
    seen = DataParallel(lambda: torch.nn.Linear(2, 1))(
        lambda module, loader, device, context: [
            (str(device), module(batch).shape, context.getattr_or("count", 4)) for batch in loader
        ],
        [torch.ones(3, 2)] * 2,
    )
    assert seen == [[("xla:0", (3, 1), 4)] * 2]


def test_parts_in_files_become_one_state(tmp_path):
    meta = {"names": {"w": "layer.weight", "b": "layer.bias"}, "shapes": {"w": torch.Size([3, 1])}}
    for rank in range(2):
        part = {
            "model": {"w": torch.arange(2.0) + 2 * rank, "b": torch.ones(1)},
            "shard_metadata": {**meta, "rank": rank},
        }
        torch.save(part, tmp_path / f"net_rank-{rank}-of-2.pth")
    whole, path = consolidate_sharded_model_checkpoints(str(tmp_path / "net"))
    assert whole["layer.weight"].tolist() == [[0.0], [1.0], [2.0]] and torch.load(path)["model"][
        "layer.bias"
    ].tolist() == [1.0]


@pytest.mark.slow
def test_placements_of_pytorch_lay_tensors_out():
    done = run_forked(
        """
    import torch
    import dynamotor.xla.start
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, Replicate
    from dynamotor.xla.distributed.spmd import XLAShardedTensor
    from dynamotor.xla.distributed.spmd.api import convert_to_xla_mesh, xla_distribute_module, xla_distribute_tensor
    class Mesh:
        mesh, mesh_dim_names = torch.arange(4).reshape(2, 2), ("x", "y")
    x = torch.arange(32.0).reshape(4, 8)
    t = xla_distribute_tensor(x, Mesh(), [Replicate(), Shard(1)])
    assert t.sharding_spec and torch.equal(t.global_tensor.cpu(), x)
    assert t.local_shards[0].data.shape == (4, 4), t.local_shards
    seen = []
    xla_distribute_module(torch.nn.Sequential(torch.nn.Linear(2, 2)), Mesh(), lambda name, module, mesh: seen.append(name))
    assert seen == ["", "0"]
    print("done")
    """,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
