"""Ops that cannot be differentiated ahead of time run in eager PyTorch; the ops around them are compiled,
gradients flow through.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor.base.events import collect, counters


@torch.library.custom_op("dm_test_around::bump", mutates_args={"x"})
def bump(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("dm_test_around::fill", mutates_args={"out"})
def fill(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(x * 2)
    return x + 1


bump.register_fake(lambda x: None)
fill.register_fake(lambda x, out: torch.empty_like(x))


class Net(nn.Module):
    """`inner` between compiled layers."""

    def __init__(self, inner, width=4):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(width, 2)

    def forward(self, x):
        y = self.inner(self.first(x).relu())
        return self.last((y[0] if isinstance(y, tuple) else y).tanh()).relu()


def old_spectral_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.spectral_norm(nn.Linear(4, 4))


class Mutating(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, x):
        return self.op(x.sin(), self.seen)


def on_a_copy(y, seen):
    z = y.detach().clone()
    bump(z)
    return (y * z).cos()


def on_a_buffer(y, seen):
    bump(seen)
    return (y * seen).cos()


def on_a_buffer_that_was_used(y, seen):
    z = y * seen.cos()
    fill(y.detach(), seen)
    return z * seen


def with_a_result(y, seen):
    with torch.no_grad():
        w = fill(y, seen)
    return (y * seen + w).cos()


def under_autocast(y, seen):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = y @ y.T
        bump(seen)
        y = y @ y.T
    return y.float() @ seen


WRITING = {
    op.__name__: op
    for op in (on_a_copy, on_a_buffer, on_a_buffer_that_was_used, with_a_result, under_autocast)
}
MODULES = {
    "lstm": lambda: Net(nn.LSTM(4, 5), 5),
    "lstm_of_two_ways": lambda: Net(nn.LSTM(4, 5, num_layers=2, bidirectional=True), 10),
    "spectral_norm": lambda: Net(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
    "spectral_norm_with_hooks": lambda: Net(old_spectral_norm()),
    **{name: lambda op=op: Net(Mutating(op)) for name, op in WRITING.items()},
}


def steps(module, run, x):
    found = []
    for _ in range(2):
        y = run(x)
        y.square().sum().backward()
        found.append(y.detach())
    return [*found, x.grad, *[p.grad for p in module.parameters()], *[b.clone() for b in module.buffers()]]


@pytest.mark.parametrize("name", MODULES)
def test_modules_with_such_an_op_train_as_eagers(name):
    results, kinds = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = MODULES[name]()
        x = torch.randn(3, 4).requires_grad_()
        with collect("aten_graph") as graphs:
            results.append(steps(module, dynamotor.compile(module) if compiled else module, x))
        kinds.append([event.data["stage"] for event in graphs])
    torch.testing.assert_close(results[1], results[0])
    if name in WRITING or name.startswith("spectral_norm"):  # what writes is in the graph
        assert kinds[1].count("forward") == 1
    else:
        assert kinds[1].count("forward") >= 2


def written_leaf(x, w):
    y = (x * x.sum()).relu().sin()
    with torch.no_grad():
        w.add_(1.0)
    return y + (w * 2).cos()


def written_result(x, w):
    y = x.sin().cos() + 1
    w.mul_(2)
    return y * w.tanh() + w


def written_after_use(x, w):
    y = (x * w.sum()).relu()
    z = y.sin().cos()
    w.mul_(2)
    return z * w


def begins_to_need(x, w):
    y = x.sin().cos()
    state = w.detach().clone()
    state.mul_(y.sum())
    return state * 2


@pytest.mark.parametrize(
    ("function", "leaf"),
    [(written_leaf, True), (written_result, False), (written_after_use, False), (begins_to_need, True)],
)
def test_inputs_that_take_part_in_the_gradient_are_written(function, leaf):
    results, unnamed = [], counters["fallback"]["aot.RuntimeError"]
    for run in (function, dynamotor.compile(function)):
        torch.manual_seed(0)
        x, start = torch.randn(3, 4).requires_grad_(), torch.randn(3, 4).requires_grad_()
        for _ in range(2):
            w = start if leaf else start * 3
            out = run(x, w)
            (out.sum() + w.square().sum()).backward()
        results.append((out.detach(), w.detach(), x.grad, start.grad))
    torch.testing.assert_close(results[1], results[0])
    assert counters["fallback"]["aot.RuntimeError"] == unnamed  # DM231 says which write


def test_strict_refuses_the_op():
    with pytest.raises(dynamotor.BackendError, match="DM238|DM409"):
        dynamotor.compile(MODULES["lstm"](), options={"strict": True})(torch.randn(3, 4))


def test_many_such_ops_end_in_one_eager_part():
    def function(x):
        for _ in range(12):
            z = x.detach().clone()
            bump(z)
            x = (x * z).sin()
        return x

    counters.clear()
    x, same = torch.randn(3, 4).requires_grad_(), None
    same = x.detach().clone().requires_grad_()
    dynamotor.compile(function)(x).sum().backward()
    function(same).sum().backward()
    torch.testing.assert_close(x.grad, same.grad)
    assert counters["fallback"]["aot.DM236"] <= 10


def composite(x, weight):
    return nn.functional.layer_norm(nn.functional.linear(x, weight), (4,)), x.matmul(weight)


def test_inference_mode_hides_no_parts_of_composite_ops():
    x, weight = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    with torch.inference_mode(), collect("aten_graph") as graphs:
        found = dynamotor.compile(composite)(x, weight)
        torch.testing.assert_close(found, composite(x, weight))
        assert all(t.is_inference() for t in found)
    with torch.no_grad(), collect("aten_graph") as plain:
        dynamotor.compile(composite)(x, weight)
    assert _ops(graphs) == _ops(plain)


def _ops(events):
    return [
        str(node.target)
        for event in events
        for node in event.data["graph"].graph.nodes
        if node.op == "call_function"
    ]


def test_gradients_switched_on_inside_inference_mode():
    def function(x, weight):
        with torch.enable_grad():
            return x @ weight

    x, weight = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    with torch.inference_mode():
        for run in (function, dynamotor.compile(function)):
            result = run(x, weight)
            assert result.requires_grad == function(x, weight).requires_grad
