"""The bridge's backends under torch.compile's own capture."""

import copy
import tomllib
from pathlib import Path

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

from children import run_forked  # noqa: E402

from dynamotor.xla import (
    metrics,  # noqa: E402
    torch_compile as torch_compile_xla,  # noqa: E402
)
from dynamotor.xla.sync import sync  # noqa: E402


@pytest.mark.parametrize("backend", [torch_compile_xla.xla_backend, torch_compile_xla.xla_everytime_backend])
def test_models_train_under_torch_compile(backend):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
    )
    device = copy.deepcopy(model).to("xla")
    torch._dynamo.reset()
    fast = torch.compile(device, backend=backend)
    for _ in range(2):
        x = torch.randn(3, 6)
        for net, inputs in ((fast, x.to("xla")), (model, x)):
            net.zero_grad()
            net(inputs).square().sum().backward()
    for mine, expected in zip(device.parameters(), model.parameters()):
        torch.testing.assert_close(mine.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-5)


def test_calls_of_trace_once_record_nothing():
    model = torch.nn.Linear(4, 4).to("xla")
    torch._dynamo.reset()
    fast = torch.compile(model, backend=torch_compile_xla.xla_backend)
    x = torch.randn(2, 4, device="xla")
    with torch.no_grad():
        fast(x)
        sync()
        before = sum(n for name, n in metrics.all_counters().items() if name.startswith("xla::"))
        result = fast(x)
    assert sum(n for name, n in metrics.all_counters().items() if name.startswith("xla::")) == before
    torch.testing.assert_close(
        result.cpu(),
        torch.nn.functional.linear(x.cpu(), model.weight.detach().cpu(), model.bias.detach().cpu()),
    )


NAMES = ("xla", "torchxla_trace_once", "aot_torchxla_trace_once", "torchxla_trivial", "aot_torchxla_trivial")


def test_ops_between_two_graphs_are_not_captured_themselves():
    """Sizes that data decides break the graph: such an op runs on the lazy device, whose code is not traced."""

    def f(x):
        y = x * 2
        return y.nonzero() + 1, torch.unique(y.round()) - 1

    x = torch.randn(4, 4)
    torch._dynamo.reset()
    for got, want in zip(torch.compile(f, backend="xla")(x.to("xla")), f(x)):
        torch.testing.assert_close(got.cpu(), want)


@pytest.mark.slow
def test_the_names_that_users_of_torch_xla_know_are_found(tmp_path):
    """Through entry points as an installation writes them, in a process of its own; and under our own
    capture.
    """
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    backends = project["entry-points"]["torch_dynamo_backends"]
    info = tmp_path / "names-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: names\nVersion: 0\n")
    rows = [f"{name} = {target}" for name, target in backends.items() if name in NAMES]
    (info / "entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *rows]))
    program = f"""
import sys
sys.path.insert(0, sys.argv[1])
import torch, dynamotor, dynamotor.xla
x = torch.arange(3.0)
for name in {NAMES}:
    torch._dynamo.reset()
    for fast in (torch.compile(lambda x: x.sin() * 2 + 1, backend=name), dynamotor.compile(lambda x: x.sin() * 2 + 1, backend=name)):
        y = fast(x.to("xla"))
        assert y.device.type == "xla"
        torch.testing.assert_close(y.cpu(), x.sin() * 2 + 1)
"""
    done = run_forked(program, str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pytorchs_own_name_is_the_bridge_where_the_alias_is_installed(early):
    """`backend="openxla"`, which PyTorch registers, whether it was looked up before or not."""
    program = f"""
import copy, torch, dynamotor.xla
if {early}:
    assert "openxla" in torch._dynamo.list_backends()
dynamotor.xla.install_as_torch_xla()
import torch_xla
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
host = copy.deepcopy(model)
fast = torch.compile(model.to("xla"), backend="openxla")
x = torch.randn(4, 3)
for _ in range(2):
    fast(x.to("xla"))[:, 0].sum().square().backward()
    host(x)[:, 0].sum().square().backward()
for a, b in zip([*model.parameters(), *model.buffers()], [*host.parameters(), *host.buffers()]):
    torch.testing.assert_close(a.cpu(), b)
    assert a.grad is None and b.grad is None or torch.testing.assert_close(a.grad.cpu(), b.grad) is None
"""
    done = run_forked(program)
    assert done.returncode == 0, done.stderr


def test_executables_that_were_not_used_lately_are_forgotten(monkeypatch):
    from dynamotor.xla import sync as device_sync
    from dynamotor.xla.recent import Recent

    kept = Recent(3)
    monkeypatch.setattr(device_sync, "_executables", kept)
    for round_ in range(2):
        for size in range(1, 6):
            assert (torch.ones(size, device="xla") + round_).tolist() == [1.0 + round_] * size
            assert len(kept) <= 3
    assert metrics.all_counters()["ForgottenExecutable"] == kept.forgotten > 2
    table = Recent(2)
    table["a"], table["b"] = 1, 2
    assert table.get("a") == 1
    table["c"] = 3
    assert list(table) == ["a", "c"]
