"""The bridge: executables instead of records, plans of outputs, cuts around what only the CPU can run."""

import threading

import pytest
import torch

jax = pytest.importorskip("jax", reason="jax is not installed")

import dynamotor  # noqa: E402
from dynamotor import xla  # noqa: E402, F401
from dynamotor.base.config import config  # noqa: E402
from dynamotor.base.errors import XlaError  # noqa: E402
from dynamotor.base.events import collect  # noqa: E402
from dynamotor.xla import metrics, placement, rng  # noqa: E402
from dynamotor.xla.sync import sync  # noqa: E402

BACKENDS = ("xla", "xla_trace_everytime")


def recorded() -> int:
    return sum(n for name, n in metrics.all_counters().items() if name.startswith("xla::"))


def both(function, *inputs, backend="xla"):
    """(result on the device through the bridge, result of CPU eager)."""
    fast = dynamotor.compile(function, backend=backend)
    return fast(*[t.to("xla") for t in inputs]), function(*inputs)


def assert_same(mine, expected):
    torch.testing.assert_close(mine.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_gives_eagers_result(backend):
    mine, expected = both(
        lambda x, y: (x @ y).relu() + x.sum(), torch.randn(4, 4), torch.randn(4, 4), backend=backend
    )
    assert mine.device.type == "xla"
    assert_same(mine, expected)


def test_calls_record_nothing_and_run_one_executable():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to("xla")
    x = torch.randn(3, 8, device="xla")
    fast = dynamotor.compile(model, backend="xla")
    with torch.no_grad():
        fast(x)
        sync()
        before, runs = recorded(), metrics.timings["ExecuteTime"].count
        fast(x)
        assert recorded() == before
        assert metrics.timings["ExecuteTime"].count == runs + 1


def test_a_run_that_fails_is_a_coded_error_and_the_next_call_works():
    fast, x = dynamotor.compile(lambda x: x * 2 + 1, backend="xla"), torch.ones(2, device="xla")
    with collect("xla.program") as programs:
        fast(x)
    program = programs[0].data["program"]
    start = program.start

    def failing(arrays):
        raise ValueError("out of memory")

    program.set_start(failing, placement.settings())
    with pytest.raises(XlaError, match="DM603"):
        fast(x)
    program.set_start(start, placement.settings())
    free = []
    thread = threading.Thread(target=lambda: free.append(fast(x).tolist()))  # the lock is free
    thread.start()
    thread.join(30)
    assert free == [[3.0, 3.0]]


def test_outputs_that_are_inputs_constants_or_each_other_follow_the_plan():
    def function(x, y):
        z = x + y
        return x, z, z, None, 3, torch.arange(3, device=x.device), y.view(-1)

    fast = dynamotor.compile(function, backend="xla")
    x, y = torch.randn(2, 2), torch.randn(2, 2)
    dx, dy = x.to("xla"), y.to("xla")
    mine = fast(dx, dy)
    assert mine[0] is dx and mine[3] is None and mine[4] == 3
    for index in (1, 2):
        assert_same(mine[index], x + y)
    assert mine[5].tolist() == [0, 1, 2]
    dy.add_(1)
    assert_same(mine[6], (y + 1).view(-1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_written_in_place_are_updated(backend):
    def function(state, x):
        state.mul_(0.5).add_(x)
        return state.sum()

    state, x = torch.randn(3), torch.randn(3)
    device = state.to("xla")
    fast = dynamotor.compile(function, backend=backend)
    for _ in range(3):
        mine, expected = fast(device, x.to("xla")), function(state, x)
        assert_same(mine, expected)
        assert_same(device, state)


def test_batch_norm_updates_its_buffers_once_a_call():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    import copy

    device = copy.deepcopy(model).to("xla")
    fast = dynamotor.compile(device, backend="xla")
    for _ in range(3):
        x = torch.randn(2, 3, 6, 6)
        assert_same(fast(x.to("xla")), model(x))
    assert_same(device[1].running_var, model[1].running_var)
    assert device[1].num_batches_tracked.item() == 3


def test_training_gives_eagers_gradients():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
    ).double()
    import copy

    device = copy.deepcopy(model).to("xla")
    fast = dynamotor.compile(device, backend="xla")
    x = torch.randn(5, 6, dtype=torch.float64)
    fast(x.to("xla")).square().sum().backward()
    model(x).square().sum().backward()
    for mine, expected in zip(device.parameters(), model.parameters()):
        torch.testing.assert_close(mine.grad.cpu(), expected.grad, rtol=1e-9, atol=1e-9)


def test_random_numbers_are_those_of_the_lazy_device():
    def function(x):
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    x = torch.randn(64, device="xla")
    results = []
    for function_or_backend in (None, *BACKENDS):
        run = (
            function
            if function_or_backend is None
            else dynamotor.compile(function, backend=function_or_backend)
        )
        sync()
        rng.set_state(11)
        calls = []
        for _ in range(3):
            calls.append(run(x))
            sync()
        results.append(torch.stack([c.cpu() for c in calls]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not torch.equal(results[0][0], results[0][1])


def test_an_op_that_only_the_cpu_runs_cuts_the_graph_and_keeps_the_result():
    def function(x):
        y = x * 2 + 1
        z = torch.special.bessel_j1(y).abs().sum()
        return z + y.sum()

    with collect("xla.partition") as cuts:
        mine, expected = both(function, torch.randn(4, 4, dtype=torch.float64))
    assert_same(mine, expected)
    assert any("bessel_j1" in reason for reason in cuts[0].data["reasons"])


def test_tensors_from_the_cpu_are_moved_where_the_program_moves_them():
    mine, expected = both(lambda x: x + 1, torch.randn(3))
    assert_same(mine, expected)
    fast = dynamotor.compile(lambda x: x.to("xla") * 2, backend="xla")
    x = torch.randn(3)
    assert_same(fast(x), x * 2)


def test_a_changed_shape_or_grad_mode_is_compiled_anew():
    fast = dynamotor.compile(lambda x: x.exp().sum(0), backend="xla")
    for shape in ((2, 3), (4, 3), (2, 3)):
        x = torch.randn(*shape)
        assert_same(fast(x.to("xla")), x.exp().sum(0))
    x = torch.randn(2, 3, requires_grad=True)
    device = x.detach().to("xla").requires_grad_()
    fast(device).sum().backward()
    x.exp().sum().backward()
    assert_same(device.grad, x.grad)


def test_pending_inputs_are_computed_first():
    fast = dynamotor.compile(lambda x: x - 1, backend="xla")
    x = torch.ones(3, device="xla")
    fast(x)
    assert fast(x * 5 + 2).tolist() == [6.0, 6.0, 6.0]


def test_a_compiled_dropout_has_the_gradient_of_its_mask():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).to("xla")
    x = torch.ones(8, 4, device="xla", requires_grad=True)
    y = dynamotor.compile(model, backend="xla")(x)
    y.sum().backward()
    kept = (y.detach() != 0).float() * 2
    torch.testing.assert_close(x.grad.cpu(), (kept @ model[0].weight.detach()).cpu())


def test_auto_measures_xla_for_tensors_of_the_cpu(tmp_path):
    given, how = torch.randn(4, requires_grad=True), {"auto_backends": "eager,xla"}
    with config.patch(auto_seconds=0.0, cache_dir=str(tmp_path), check=False), collect("auto") as events:
        out = dynamotor.compile(lambda x: (x.sin() + 1).relu(), backend="auto", options=how)(given)
    assert_same(out, (given.sin() + 1).relu())
    assert [(time.name, time.out) for time in events[0].data["times"]] == [("eager", ""), ("xla", "")]
