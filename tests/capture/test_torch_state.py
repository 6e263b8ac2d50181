"""What hangs on tensors and on PyTorch's state: attributes, modes, transforms, hooks of the backward pass,
inference mode.
"""

from __future__ import annotations

import types

import pytest
import torch
from kept_graphs import Recorder
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import dynamotor


def test_attributes_given_to_tensors_stay_on_them():
    def fn(a):
        b = a * 2
        b.tag = "made"
        a.seen = [1, b]
        return b, b.tag

    a = torch.randn(3)
    compiled = dynamotor.compile(fn, backend=Recorder(), fullgraph=True)
    for _ in range(2):
        b, tag = compiled(a)
        assert b.tag == tag == "made" and a.seen[0] == 1 and a.seen[1] is b
        del a.seen


def test_an_attribute_added_to_an_input_is_seen():
    compiled = dynamotor.compile(
        lambda a: a * (3 if hasattr(a, "flag") else 2), backend=Recorder(), fullgraph=True
    )
    a = torch.randn(3)
    assert torch.equal(compiled(a), a * 2)
    a.flag = True
    assert torch.equal(compiled(a), a * 3)


def test_dicts_keyed_by_tensors():
    key = torch.ones(2)
    table = {key: torch.full((3,), 4.0)}
    compiled = dynamotor.compile(lambda a: (a + table[key], key in table), backend=Recorder(), fullgraph=True)
    a = torch.randn(3)
    out, found = compiled(a)
    assert found and torch.equal(out, a + 4)


class SeeOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class SeeCalls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [SeeOps, SeeCalls])
@pytest.mark.parametrize("warm", [True, False])
def test_modes_of_the_user_see_what_eager_runs(mode, warm):
    def fn(a):
        return torch.sin(a) * 2

    compiled = dynamotor.compile(fn, backend="aot_eager")
    if warm:
        compiled(torch.randn(3))
    with mode() as expected:
        fn(torch.randn(3))
    with mode() as seen:
        compiled(torch.randn(3))
    assert [n for n in seen.names if "randn" not in n] == [n for n in expected.names if "randn" not in n]


def test_function_transforms_over_a_compiled_function():
    compiled = dynamotor.compile(lambda a: (a.sin() * 2).sum(), backend="aot_eager")
    a = torch.randn(4, 5)
    compiled(a)
    torch.testing.assert_close(torch.vmap(compiled)(a), (a.sin() * 2).sum(1))
    torch.testing.assert_close(torch.func.grad(compiled)(a), 2 * a.cos())


def test_backward_hooks_of_modules_run():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    seen = []
    model[0].register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0].shape))
    dynamotor.compile(model, backend=Recorder())(torch.randn(2, 3)).sum().backward()
    assert seen == [(2, 3)]


def test_inference_mode_and_inference_tensors():
    def fn(a):
        a += 1
        return a * 2

    compiled = dynamotor.compile(fn, backend=Recorder(), fullgraph=True)
    with torch.inference_mode():
        a = torch.ones(3)
        assert torch.equal(compiled(a), torch.full((3,), 4.0)) and torch.equal(a, torch.full((3,), 2.0))
    plain = torch.ones(3)
    out = compiled(plain)
    assert not out.is_inference() and torch.equal(out, torch.full((3,), 4.0))


def test_a_region_of_inference_mode_is_one_graph():
    @torch.inference_mode()
    def inner(x):
        return x.exp() + 1

    def fn(x):
        with torch.inference_mode():
            y = x.sin() * 2
            z = y.view(-1)
        return y, z, x * 2, inner(x)

    compiled = dynamotor.compile(fn, backend="eager")
    x = torch.randn(2, 2, requires_grad=True)
    for captures in (1, 0):
        dynamotor.counters["capture"].clear()
        for got, want in zip(compiled(x), fn(x), strict=True):
            assert torch.equal(got, want) and got.requires_grad is want.requires_grad
            assert got.is_inference() is want.is_inference()
        assert dynamotor.counters["capture"].total() == captures


def test_overlapping_arguments_are_seen():
    """The graph of two separate arguments must not serve two views of one memory when it writes."""

    def fn(a, b):
        a.add_(1)
        return a * b

    for backend in ("eager", "aot_eager"):
        compiled = dynamotor.compile(fn, backend=backend)
        a, b = torch.ones(4), torch.ones(4)
        assert torch.equal(compiled(a, b), torch.full((4,), 2.0))
        memory = torch.ones(6)
        assert torch.equal(compiled(memory[:4], memory[1:5]), torch.tensor([4.0, 4.0, 4.0, 2.0]))
        same = torch.ones(4)
        assert torch.equal(compiled(same, same), torch.full((4,), 4.0))


def test_a_non_leaf_input_may_be_written():
    def fn(a):
        a.mul_(3)
        return a * a

    for backend in ("eager", "aot_eager"):
        leaf = torch.ones(3, requires_grad=True)
        dynamotor.compile(fn, backend=backend)(leaf * 1).sum().backward()
        assert torch.equal(leaf.grad, torch.full((3,), 18.0))


def test_a_leaf_that_requires_grad_raises_as_in_eager():
    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        dynamotor.compile(lambda a: a.mul_(2), backend=Recorder())(leaf)


class Counting(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.steps, self.left, self.use = 0, 100, use

    def forward(self, a):
        self.steps += 1
        self.left = self.left - 1
        if self.use and self.steps % 2:
            return a * 2, self.steps
        return a * 3, self.steps


def test_counters_do_not_compile_again_and_again():
    backend = Recorder()
    model = Counting(False)
    compiled = dynamotor.compile(model, backend=backend, fullgraph=True)
    a = torch.randn(3)
    for i in range(1, 20):
        out, steps = compiled(a)
        assert steps == model.steps == i and model.left == 100 - i and torch.equal(out, a * 3)
    assert len(backend.graphs) <= 3


def test_counters_that_decide_are_guarded():
    model = Counting(True)
    compiled = dynamotor.compile(model, backend=Recorder())
    a = torch.randn(3)
    for i in range(1, 14):
        out, steps = compiled(a)
        assert steps == i and torch.equal(out, a * (2 if i % 2 else 3))


def test_a_counter_that_turns_into_another_type_is_seen():
    model = Counting(False)
    compiled = dynamotor.compile(model, backend=Recorder())
    a = torch.randn(3)
    for _ in range(4):
        compiled(a)
    model.steps = 1.5
    assert compiled(a)[1] == 2.5
    model.steps = True
    assert compiled(a)[1] == 2


@pytest.mark.parametrize("warm", [True, False])
def test_other_tracers_see_every_op(warm):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = dynamotor.compile(model, backend="aot_eager")
    a = torch.randn(2, 3)
    if warm:
        compiled(a)
    traced = torch.jit.trace(compiled, (a,))
    other = torch.randn(2, 3)
    torch.testing.assert_close(traced(other), model(other))
    inner = dynamotor.compile(lambda t: torch.relu(t) + 1, backend="aot_eager")
    graph = torch.fx.symbolic_trace(lambda t: inner(t))
    torch.testing.assert_close(graph(other), torch.relu(other) + 1)


def test_flags_that_a_program_asks_for_are_guarded():
    compiled = dynamotor.compile(
        lambda a: a * (2 if torch.backends.mha.get_fastpath_enabled() else 3), backend=Recorder()
    )
    a = torch.randn(3)
    assert torch.equal(compiled(a), a * 2)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert torch.equal(compiled(a), a * 3)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_modes_that_are_set_and_back_again_leave_no_calls():
    def program(x, y):
        before = torch.is_grad_enabled()
        for enabled in (False, True, False):
            torch.set_grad_enabled(enabled)
        x.add_(y)
        with torch.enable_grad():
            pass
        torch.set_grad_enabled(before)

    graphs = []
    x = torch.nn.Parameter(torch.zeros(4))
    dynamotor.compile(program, backend=lambda gm, _: graphs.append(gm.graph) or gm)(x, torch.ones(4))
    (graph,) = graphs
    assert [n.args for n in graph.nodes if n.target is torch._C._set_grad_enabled] == [(False,), (True,)]
    assert torch.is_grad_enabled() and torch.equal(x, torch.ones(4))


class _Settings(types.ModuleType):
    kept = 1

    @property
    def value(self):
        return _Settings.kept

    @value.setter
    def value(self, new):
        _Settings.kept = new


settings = _Settings("settings")


@pytest.mark.regression
def test_a_name_that_a_modules_class_sets():
    """As those of torch.backends: it was stored beside, and nothing was set."""

    def fn(new):
        settings.value = new
        return settings.value

    compiled = dynamotor.compile(fn, backend="eager")
    for new in (2, 3, 2):
        assert compiled(new) == new == _Settings.kept
    assert "value" not in vars(settings)


@pytest.mark.regression
def test_settings_of_backends_are_set():
    def fn(x):
        torch.backends.cudnn.deterministic = True
        return x + 1

    with getattr(torch.backends, "__allow_nonbracketed_mutation")():  # PyTorch's test library forbids it
        before = torch.backends.cudnn.deterministic
        try:
            dynamotor.compile(fn, backend="eager")(torch.ones(1))
            assert torch._C._get_cudnn_deterministic()
        finally:
            torch.backends.cudnn.deterministic = before


def test_a_program_may_look_at_the_stack_of_dispatch_modes():
    """nn.MultiheadAttention does, with inference's fast path."""

    def f(x):
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        return x + 1 + len(modes)

    compiled, x = dynamotor.compile(f, backend="aot_eager", fullgraph=True), torch.ones(2)
    assert compiled(x).equal(f(x))

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        assert dynamotor.compile(f, backend="aot_eager")(x).equal(f(x))
