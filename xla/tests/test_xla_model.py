"""xm, xr and the functions of the package, in a world of one."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

pytest.importorskip("jax")
import dynamotor.xla as torch_xla  # noqa: E402
import dynamotor.xla.core.functions as xf  # noqa: E402
import dynamotor.xla.core.xla_model as xm  # noqa: E402
import dynamotor.xla.runtime as xr  # noqa: E402
from dynamotor.base.errors import DynamotorError  # noqa: E402
from dynamotor.xla.utils.utils import DataWrapper, FnDataGenerator, SampleGenerator, getenv_as  # noqa: E402


def test_devices():
    assert (
        xm.xla_device()
        == torch.device("xla:0")
        == torch_xla.device()
        == torch_xla.device(0)
        == xr.xla_device()
    )
    assert xm.get_xla_supported_devices() == [str(d) for d in torch_xla.devices()]
    assert xm.get_xla_supported_devices("TPU") == [] and xm.get_xla_supported_devices(
        "CPU", max_devices=1
    ) == ["xla:0"]
    assert xm.xla_device_hw("xla:0") == xm.xla_device_hw(torch.device("xla")) == "CPU" == xr.device_type()
    assert xm.xla_real_devices() == torch_xla.real_devices() and xm.xla_real_devices(["xla:0"]) == ["CPU:0"]
    assert torch_xla.device_count() == xr.addressable_device_count() == len(torch_xla.devices())
    with pytest.raises(DynamotorError, match="DM660"):
        xm.xla_device(99)
    with pytest.raises(DynamotorError, match="DM660"):
        xm.xla_device(devkind="TPU")


def test_a_world_of_one():
    assert (xm.get_ordinal(), xm.get_local_ordinal(), xm.xrt_world_size(), xm.is_master_ordinal()) == (
        0,
        0,
        1,
        True,
    )
    assert (xr.global_ordinal(), xr.local_ordinal(), xr.world_size()) == (0, 0, 1)
    assert (xr.process_index(), xr.process_count(), xr.host_index(), xr.local_process_count()) == (0, 1, 0, 1)
    assert (
        xr.global_runtime_device_attributes()[0]["name"]
        == "CPU:0"
        == xr.runtime_device_attributes("CPU:0")["name"]
    )
    with pytest.raises(DynamotorError, match="DM658"):
        xr.set_device_type("TPU")
    xr.set_device_type("CPU")
    with pytest.raises(DynamotorError, match="DM665"):
        xr.use_spmd(auto=True)
    assert not xr.is_spmd()


def test_memory_info():
    gc.collect()  # what earlier tests left, in memory or pending, must not be freed between the two looks
    xm.mark_step()
    before = xm.get_memory_info("xla:0")
    held = torch.ones(1 << 24, device="xla")
    xm.mark_step()
    after = xm.get_memory_info(xm.xla_device())
    # 64 MiB more, but for the few bytes that another thread may free meanwhile.
    assert (
        after["bytes_used"] - before["bytes_used"] >= 63 << 20
        and after["kb_total"] * 1024 == after["bytes_limit"]
    )
    assert 0 < after["kb_free"] <= after["kb_total"] and held.sum().item() == 1 << 24


def test_step_closures_run_after_the_barrier_in_order():
    x = torch.ones(3, device="xla") * 2
    seen = []
    xm.add_step_closure(lambda t, n: seen.append((n, t.sum().item())), args=(x, 1))
    xm.add_step_closure(lambda: seen.append(threading.current_thread() is threading.main_thread()))
    assert not seen
    xm.mark_step()
    assert seen == [(1, 6.0), True]
    xm.mark_step()
    assert len(seen) == 2
    done = threading.Event()
    xm.add_step_closure(lambda t: done.set() if t.sum().item() == 6.0 else None, args=(x,), run_async=True)
    torch_xla.sync(wait=True)
    assert done.wait(10)
    xm.wait_device_ops()
    xm.wait_device_ops(["xla:0"])


def test_random_state():
    xm.set_rng_state(42)
    assert xm.get_rng_state() == 42 == xm.get_rng_state("xla:0")
    a = torch.rand(4, device="xla").cpu()
    torch_xla.manual_seed(42)
    assert torch.equal(torch.rand(4, device="xla").cpu(), a)
    with xm.fork_rng():
        inside = torch.rand(4, device="xla").cpu()
    assert torch.equal(torch.rand(4, device="xla").cpu(), inside)


def test_optimizer_step_returns_what_the_optimizer_returns():
    p = torch.nn.Parameter(torch.ones(2, device="xla"))
    optimizer = torch.optim.SGD([p], lr=0.5)
    p.sum().backward()
    assert xm.optimizer_step(optimizer, barrier=True, optimizer_args={"closure": lambda: 7}) == 7
    assert p.tolist() == [0.5, 0.5]


def test_gradients_can_be_changed_in_place():
    p = torch.nn.Parameter(torch.ones(2, 3, device="xla"))
    q = torch.nn.Parameter(torch.ones(3, device="xla"))
    (p.sum() + p.mean(0).sum() + (p * q).sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_([p, q], 1.0)
    assert norm.item() == pytest.approx((6 * 2.5**2 + 3 * 4) ** 0.5)
    total = torch.cat([p.grad.flatten(), q.grad]).norm().item()
    assert total == pytest.approx(1.0, abs=1e-5)
    r = torch.nn.Parameter(torch.ones(2, 3, device="xla"))
    r.sum().backward()
    r.grad[0].add_(1)
    assert r.grad.tolist() == [[2.0] * 3, [1.0] * 3]
    r.sum().backward()
    assert r.grad.tolist() == [[3.0] * 3, [2.0] * 3]
    torch.optim.SGD([r], lr=0.1).zero_grad(set_to_none=False)
    assert r.grad.tolist() == [[0.0] * 3] * 2


def test_send_data_and_print(capsys):
    class Graph(DataWrapper):
        def __init__(self, nodes):
            self.nodes, self.name = nodes, "g"

    sent = xm.send_cpu_data_to_device(
        [torch.ones(2), {"a": (torch.zeros(1), "x")}, Graph(torch.ones(3))], xm.xla_device()
    )
    assert sent[0].device.type == "xla" and sent[1]["a"][0].device.type == "xla" and sent[1]["a"][1] == "x"
    assert sent[2].nodes.device.type == "xla" and sent[2].name == "g"
    (key,) = xm.send_cpu_data_to_device({torch.ones(2): 1}, xm.xla_device())
    assert key.device.type == "xla"
    assert xm.is_xla_tensor(sent[0]) and not xm.is_xla_tensor(torch.ones(1))
    xm.master_print("hello", 3)
    assert capsys.readouterr().out == "hello 3\n"


def test_generators(monkeypatch):
    assert [next(iter(SampleGenerator("d", 2)))] == ["d"] and list(SampleGenerator(5, 3)) == [5, 5, 5]
    generator = SampleGenerator(1, 2)
    assert len(generator) == 2 and list(generator) == list(generator) == [1, 1]
    pairs = list(FnDataGenerator(lambda x: x * 2, 4, torch.randn, dims=[3], count=2))
    assert len(pairs) == 2 and all(torch.equal(x * 2, y) and x.shape == (4, 3) for x, y in pairs)
    monkeypatch.setenv("SOME_FLAG", "0")
    assert (
        getenv_as("SOME_FLAG", bool) is False
        and getenv_as("SOME_FLAG", int) == 0
        and getenv_as("NONE", int, 3) == 3
    )


def test_rate_tracker(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(xm.time, "time", lambda: now[0])
    tracker = xm.RateTracker(smooth_factor=0.5)
    for count, expected in ((10, 10.0), (20, 15.0), (0, 7.5)):
        tracker.add(count)
        now[0] += 1
        assert tracker.rate() == expected
    assert tracker.global_rate() == 10.0


def overlap(a, b):
    height, width = (max(0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    area = lambda c: (c[2] - c[0]) * (c[3] - c[1])  # noqa: E731
    return height * width / (area(a) + area(b) - height * width)


@pytest.mark.parametrize("n,size", [(1, 1), (40, 40), (40, 7), (40, 0)])
def test_nms_takes_the_best_boxes_that_do_not_overlap(n, size):
    corners = torch.rand(n, 2) * 10
    boxes = torch.cat([corners, corners + torch.rand(n, 2) * 5 + 0.1], 1)
    scores = torch.rand(n)
    expected = []
    for i in scores.argsort(descending=True).tolist():
        if scores[i] > 0.2 and all(overlap(boxes[i].tolist(), boxes[j].tolist()) <= 0.4 for j in expected):
            expected.append(i)
    expected = expected[:size]
    boxes[::2] = boxes[::2][:, [2, 3, 0, 1]]  # any two opposite corners describe a box
    for device in ("cpu", "xla"):
        indices, count = xf.nms(
            boxes.to(device), scores.to(device), torch.tensor(0.2), torch.tensor(0.4), size
        )
        assert indices.device.type == device and indices.shape == (size,) and count.item() == len(expected)
        assert (
            indices.cpu()[: len(expected)].tolist() == expected and not indices.cpu()[len(expected) :].any()
        )


def test_nms_refuses_shapes_that_do_not_fit():
    with pytest.raises(DynamotorError, match="DM662"):
        xf.nms(torch.rand(3, 4), torch.rand(2), torch.tensor(0.1), torch.tensor(0.5), 2)
    with pytest.raises(DynamotorError, match="DM662"):
        xf.nms(torch.rand(3, 4), torch.rand(3), torch.tensor(0.1), torch.tensor(0.5), 4)


def test_differentiable_collectives_of_one_replica():
    x = torch.arange(3.0, device="xla", requires_grad=True)
    (
        xf.all_reduce(xm.REDUCE_SUM, x, scale=2.0) * torch.tensor([1.0, 2.0, 3.0], device="xla")
    ).sum().backward()
    assert x.grad.tolist() == [2.0, 4.0, 6.0]
    assert xf.all_gather(x).tolist() == [0.0, 1.0, 2.0]
