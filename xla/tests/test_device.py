"""The device: what users see of it beside single ops (those are in test_ops_*.py and test_writes.py)."""

import copy
import pickle

import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed")

from children import run_forked  # noqa: E402

from dynamotor import config, xla  # noqa: E402
from dynamotor.base.errors import XlaError  # noqa: E402
from dynamotor.xla import metrics, transfer  # noqa: E402


def test_tensors_are_made_printed_and_read_as_on_other_devices():
    x = torch.tensor([1.5, 2.5], device="xla")
    assert str(x) == "tensor([1.5000, 2.5000], device='xla:0')"
    assert (x.device.type, x.is_xla, x.tolist(), x[1].item(), float(x.sum())) == (
        "xla",
        True,
        [1.5, 2.5],
        2.5,
        4.0,
    )
    assert torch.arange(3, device="xla").dtype is torch.int64
    assert torch.equal(x.cpu(), torch.tensor([1.5, 2.5]))
    with pytest.raises(TypeError, match="cpu"):
        x.numpy()


def test_copies_and_pickles_keep_values_and_flags():
    parameter = torch.nn.Parameter(torch.randn(3, device="xla"))
    for other in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert other.requires_grad and torch.equal(other.detach().cpu(), parameter.detach().cpu())
        with torch.no_grad():
            other.add_(1)
        assert not torch.equal(other.detach().cpu(), parameter.detach().cpu())


def test_mixed_devices_name_the_other_tensor_and_the_users_line():
    x = torch.ones(2, device="xla")
    with pytest.raises(XlaError, match=r"Input tensor is not an XLA tensor: torch.FloatTensor") as caught:
        x + torch.ones(2)
    assert caught.value.code == "DM613" and caught.value.where.filename == __file__
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(XlaError, match="DM613"):
        linear(x)


def test_zero_dimensional_cpu_tensors_mix_as_numbers():
    x = torch.ones(2, device="xla")
    assert (x * torch.tensor(2.5)).tolist() == [2.5, 2.5]


def test_wrong_shapes_raise_what_eager_raises():
    x = torch.ones(2, 3, device="xla")
    with pytest.raises(RuntimeError, match="broadcast"):
        x + torch.ones(4, 5, device="xla")
    with pytest.raises(RuntimeError):
        x.view(5)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.ones(2, dtype=torch.int64, device="xla").add_(1.5)


def test_constants_that_are_equal_but_not_the_same_do_not_share_a_program():
    x = torch.arange(6.0).view(2, 3)
    device = x.to("xla")
    assert torch.equal(device.sum(-1).cpu(), x.sum(-1))
    assert torch.equal(device.sum(-2).cpu(), x.sum(-2))
    assert (device + 1).dtype is torch.float32
    ints = torch.arange(3, device="xla")
    assert [(ints + n).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
    assert str((torch.ones(1, device="xla") * -0.0).cpu()) == "tensor([-0.])"
    assert str((torch.ones(1, device="xla") * 0.0).cpu()) == "tensor([0.])"


CHANGING = {
    "a rate": lambda x, i: x * (0.3 + i) + 0.3,
    "a count": lambda x, i: x.sum() / (3 + i),
    "a position": lambda x, i: torch.arange(3, device=x.device) + (3 + i),
    "a length": lambda x, i: torch.arange(9, device=x.device) < 3 + i,
    "a threshold": lambda x, i: x > 0.3 + i,
    "bounds": lambda x, i: x.clamp(-0.3 - i, 0.3 + i),
    "a fill": lambda x, i: x.masked_fill(x > 1, 3 + i) + torch.full_like(x, 0.3 + i),
    "a choice": lambda x, i: torch.where(x > 1, x, 0.3 + i),
    "wraps": lambda x, i: torch.arange(3, dtype=torch.int32, device=x.device) * (2**40 + 3 + i),
    "slopes": lambda x, i: torch.nn.functional.leaky_relu(x, 0.3 + i) + torch.nn.functional.elu(x, 0.3 + i),
    "a divisor": lambda x, i: torch.stack([x % (3.3 + i), x // (3.3 + i), x.fmod(3.3 + i)]),
    "factors": lambda x, i: torch.addmm(x[None], x[:, None].t(), x.diag(), beta=0.3 + i, alpha=3.3 + i),
    "values": lambda x, i: torch.nn.functional.pad(x, (1, 1), value=0.3 + i).scatter(
        0, INDEX.to(x.device), 3.3 + i
    ),
    "a momentum": lambda x, i: running_mean(x, 0.3 / (1 + i)),
}
INDEX = torch.tensor([0, 2])


def running_mean(x, momentum):
    mean, variance = torch.zeros(1, device=x.device), torch.ones(1, device=x.device)
    torch.nn.functional.batch_norm(x[:, None], mean, variance, training=True, momentum=momentum)
    return torch.cat([mean, variance])


@pytest.mark.parametrize("what", CHANGING)
def test_numbers_that_change_do_not_compile_again(what):
    host = torch.tensor([1.0, -2.0, 7.0])
    x = host.to("xla")
    xla.sync()  # what earlier tests left pending would be part of the first graph

    def run(i):  # outside of an assertion, which would keep intermediate tensors alive
        return CHANGING[what](x, i).cpu()

    run(0)
    before = metrics.counters["UncachedCompile"]
    for i in (1, 2, 41):
        torch.testing.assert_close(run(i), CHANGING[what](host, i))
    assert metrics.counters["UncachedCompile"] == before


def test_the_schedule_of_a_draw_does_not_compile_again():
    x = torch.ones(64, device="xla")
    xla.sync()

    def run(i):
        kept = torch.nn.functional.dropout(x, 0.1 + 0.1 * i)
        drawn = torch.empty(8, device="xla").uniform_(3 + i, 4 + i)
        whole = torch.randint(3 + i, 5 + i, (64,), device="xla")
        noise = torch.empty(8, device="xla").normal_(30.0 * i + 3, 0.1 + i)
        return torch.cat([kept, drawn, noise, whole]).cpu()

    run(0)
    before = metrics.counters["UncachedCompile"]
    for i in (1, 2, 3):
        kept, drawn, noise, whole = run(i).split([64, 8, 8, 64])
        assert set(whole.tolist()) == {3 + i, 4 + i}
        assert sorted(set(kept.tolist())) == pytest.approx([0.0, 1 / (0.9 - 0.1 * i)])
        assert drawn.min() >= 3 + i and drawn.max() < 4 + i
        assert abs(noise.mean() - 30 * i - 3) < 3 * (0.1 + i)
    assert metrics.counters["UncachedCompile"] == before


def test_an_op_of_unknown_shape_runs_on_the_cpu_counted_or_refused_when_strict():
    x = torch.tensor([3, 0, 2], device="xla")
    before = metrics.counters["aten::unique_dim"]
    assert torch.unique(x, dim=0).tolist() == [0, 2, 3]
    assert metrics.counters["aten::unique_dim"] == before + 1
    with config.patch(xla_strict=True), pytest.raises(XlaError, match="DM610") as caught:
        torch.unique(x, dim=0)
    assert caught.value.where.filename == __file__


def test_a_dtype_that_xla_has_not_is_refused_with_a_code():
    with pytest.raises(XlaError, match="DM609"):
        torch.ones(2, device="xla").to(torch.complex32)
    with pytest.raises(XlaError, match="DM609"):
        torch.view_as_complex(torch.ones(3, 2, dtype=torch.half, device="xla"))


def test_a_lazy_module_is_moved_after_its_first_call():
    lazy = torch.nn.LazyLinear(3)
    with pytest.raises(XlaError, match="DM609"):
        lazy.to("xla")
    lazy(torch.ones(2, 5))
    assert lazy.to("xla")(torch.ones(2, 5, device="xla")).shape == (2, 3)


def test_tensors_among_numbers_are_read():
    loss = torch.ones(2, device="xla").sum() + 1
    assert torch.equal(torch.tensor([loss, loss * 2]), torch.tensor([3.0, 6.0]))
    assert torch.tensor([[loss], [1]], device="xla").tolist() == [[3.0], [1.0]]


def test_libraries_that_look_for_shared_memory_are_told_that_there_is_none():
    with pytest.raises(NotImplementedError, match="DM616"):
        torch.ones(2, device="xla").storage()
    weights = torch.nn.Linear(2, 3).to("xla").state_dict()
    safetensors = pytest.importorskip("safetensors.torch")
    assert safetensors.load(safetensors.save(weights))["weight"].equal(weights["weight"].cpu())


def test_a_loop_that_never_marks_a_step_is_flushed_at_the_limit():
    xla.sync()
    with config.patch(xla_trace_limit=50):
        for _ in range(40):
            x = torch.ones(2).to("xla")
            for _ in range(10):
                x = x + 1
            assert len(x._alias.lane.nodes) <= 70
        assert x.tolist() == [11.0, 11.0]


def test_a_loop_on_the_device_is_flushed_at_the_limit_and_keeps_its_views_and_gradients():
    def run(device):
        x = torch.ones(4, device=device, requires_grad=True)
        y = x * 1
        for _ in range(30):
            y[1:].mul_(0.5)
            y = y + x.detach().view(2, 2)[1].sum() + torch.stack(y.split(2)).sum()
        y.sum().backward()
        return y.detach().cpu(), x.grad.cpu()

    xla.sync()
    before = metrics.counters["MarkStep"]
    with config.patch(xla_trace_limit=50):
        got = run("xla")
    torch.testing.assert_close(got, run("cpu"))
    assert metrics.counters["MarkStep"] == before


def test_what_a_user_holds_is_never_donated():
    x = torch.zeros(4, device="xla")
    xla.sync()
    held, clone = transfer.array(x), x.clone()
    x.add_(1)
    xla.sync()
    x.add_(1)
    xla.sync()
    assert held.tolist() == [0, 0, 0, 0] and clone.tolist() == [0, 0, 0, 0] and x.tolist() == [2, 2, 2, 2]


def test_step_closures_run_after_the_barrier_in_order():
    seen = []
    x = torch.ones(2, device="xla") * 3
    from dynamotor.xla.sync import add_step_closure

    add_step_closure(lambda value: seen.append(("first", value.tolist())), args=(x,))
    add_step_closure(lambda: seen.append(("second", transfer.node_of(x).data is not None)))
    assert seen == []
    xla.sync()
    assert seen == [("first", [3.0, 3.0]), ("second", True)]


def test_random_state_repeats_and_differs_between_steps():
    from dynamotor.xla import rng

    rng.set_state(5)
    one = torch.randn(4, device="xla").cpu()
    two = torch.randn(4, device="xla").cpu()
    rng.set_state(5)
    assert torch.equal(torch.randn(4, device="xla").cpu(), one) and not torch.equal(one, two)


def test_elements_of_a_computed_tensor_are_read_without_a_program():
    expected = torch.arange(24.0).reshape(2, 3, 4)
    x = expected.to("xla") * 1
    xla.sync()
    before = metrics.counters["UncachedCompile"]
    assert [v.item() for v in x.view(-1)] == list(range(24))
    assert torch.equal(x[1, :, 2:].t().cpu(), expected[1, :, 2:].t())
    assert torch.equal(x.permute(2, 0, 1)[1:, None].cpu(), expected.permute(2, 0, 1)[1:, None])
    assert metrics.counters["UncachedCompile"] == before
    row = x[1]
    x[1, 0] = 7
    assert row[0].tolist() == [7.0] * 4


def test_a_process_has_as_many_virtual_cpus_as_it_is_told():
    program = """
        import os
        import dynamotor.xla as torch_xla
        torch_xla.runtime.set_device_type("CPU")
        os.environ["CPU_NUM_DEVICES"] = "3"
        print(torch_xla.devices()[-1], torch_xla.real_devices(), torch_xla.device(2))
        try:
            torch_xla.device(10)
        except IndexError as error:
            print(error.code)
        try:
            torch_xla.runtime.set_device_type("TPU")
        except RuntimeError as error:
            print(error.code)
    """
    done = run_forked(program)
    assert done.stdout.split("\n")[:3] == [
        "xla:2 ['CPU:0', 'CPU:1', 'CPU:2'] xla:2", "DM660", "DM658"
    ], done.stdout + done.stderr  # fmt: skip
