"""step, compile and eager mode: which ops are one graph."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("jax")
import dynamotor.xla as torch_xla  # noqa: E402
from dynamotor.base.errors import DynamotorError  # noqa: E402
from dynamotor.base.events import collect  # noqa: E402
from dynamotor.xla import _XLAC, experimental  # noqa: E402
from dynamotor.xla.debug import metrics  # noqa: E402


def executions(events):
    return [e for e in events if e.kind == "xla.flush" and e.data["nodes"]]


def test_a_compiled_function_is_one_graph_a_call():
    def f(x, *, k=2):
        return torch.sin(x) * k + torch.cos(x)

    fast = torch_xla.compile(f)
    x = torch.randn(5)
    torch_xla.sync()
    with collect() as events:
        y = fast(x.to("xla"), k=3)
    assert len(executions(events)) == 1 and fast.__name__ == "f"
    torch.testing.assert_close(y.cpu(), f(x, k=3))


def test_decorator_context_manager_and_module():
    @torch_xla.compile()
    def f(x):
        return x + 1

    x = torch.ones(2, device="xla")
    assert f(x).tolist() == [2, 2] and f(x).tolist() == [2, 2]
    with torch_xla.step():
        y = x * 3
    with collect() as events:
        assert y.tolist() == [3, 3]
    assert not executions(events)
    module = torch.nn.Linear(2, 2).to("xla")
    torch.testing.assert_close(torch_xla.compile(module, full_graph=True)(x), module(x))


def test_full_graph_refuses_cuts_and_names_the_line():
    @torch_xla.compile(full_graph=True)
    def cut(x):
        y = x + 1
        if y.sum().item() > 0:
            y = y * 2
        return y

    x = torch.ones(2, device="xla")
    with pytest.raises(DynamotorError, match=r"DM663(.*\n)*.*test_regions.py(.*\n)*.*item\(\)"):
        cut(x)
    assert (x + 1).tolist() == [2, 2]
    whole = torch_xla.compile(lambda x: torch.where(x.sum() > 0, x * 2, x), full_graph=True)
    assert whole(x).tolist() == [2, 2]


def test_too_many_different_graphs():
    f = torch_xla.compile(lambda x: x.exp() - x.sin() * 1.25, max_different_graphs=2, name="growing")
    for n in (11, 12, 11):
        f(torch.ones(n, device="xla"))
    with pytest.raises(DynamotorError, match="DM664.*growing"):
        f(torch.ones(13, device="xla"))


def test_eager_mode_runs_each_op():
    assert not experimental.is_eager_mode()
    with experimental.eager_mode_context(True), collect() as events:
        assert experimental.is_eager_mode()
        x = torch.ones(3, device="xla")
        y = (x + 1) * 2
        count = len(executions(events))
        z = torch_xla.compile(lambda t: (t + 1) * 2 - t)(x)
        inside = len(executions(events)) - count
    assert count >= 3 and inside == 1 and not experimental.is_eager_mode()
    assert y.tolist() == [4, 4, 4] and z.tolist() == [3, 3, 3]
    experimental.eager_mode(True)
    experimental.eager_mode(False)
    assert not experimental.is_eager_mode()


def test_eager_mode_trains():
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    model(x).pow(2).sum().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    model = model.to("xla")
    with experimental.eager_mode_context(True):
        model(x.to("xla")).pow(2).sum().backward()
    torch.testing.assert_close(model.weight.grad.cpu(), expected)


def test_eager_mode_keeps_parameters_and_has_its_own_times():
    with experimental.eager_mode_context(True):
        metrics.clear_all()
        layer = torch.nn.Linear(2, 3)
        weight = layer.weight
        layer.to("xla")
        y = layer(torch.ones(1, 2, device="xla"))
        assert layer.weight is weight and y.shape == (1, 3)
        assert metrics.metric_data("EagerOpExecuteTime")[0] >= 1
        assert metrics.metric_data("EagerOpCompileTime") and metrics.metric_data("ExecuteTime") is None
        layer.to("cpu")
        assert layer.weight is weight


def test_executions_can_be_refused():
    x = torch.ones(2, device="xla") + 1
    _XLAC._set_allow_execution(False)
    try:
        with pytest.raises(DynamotorError, match="DM663"):
            x.tolist()
    finally:
        _XLAC._set_allow_execution(True)
    assert (x + 1).tolist() == [3.0, 3.0]
