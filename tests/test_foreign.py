"""Backends that are not ours get symbols where sizes differ between calls, as `torch.compile` gives them."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import dynamotor
from dynamotor.base.events import counters


def program(x, w):
    h = torch.nn.functional.gelu(x.flatten(1) @ w)
    return h.mean(0) * x.shape[0], h.reshape(-1)[: x.shape[0]]


def agrees(compiled, rows=(4, 6, 9, 3, 1)):
    for n in rows:
        x, w = torch.randn(n, 3, 2), torch.randn(6, 5, requires_grad=True)
        ours, eagers = compiled(x, w), program(x, w)
        torch.testing.assert_close(ours, eagers)
        grads = [torch.autograd.grad(a.sum() + b.square().sum(), w) for a, b in (ours, eagers)]
        torch.testing.assert_close(*grads)


def test_a_callable_sees_symints_and_serves_all_sizes():
    seen = []

    def backend(gm, inputs):
        seen.append([type(i) for i in inputs if not isinstance(i, torch.Tensor)])
        return gm.forward

    agrees(dynamotor.compile(program, backend=backend))
    assert seen == [[], [torch.SymInt], []]  # numbers, a symbol, and one row


def test_autograd_of_pytorch_traces_with_the_symbols():
    traced = []

    def compiler(gm, inputs):
        traced.append(gm)
        return gm.forward

    from functorch.compile import make_boxed_func

    backend = aot_autograd(fw_compiler=lambda gm, inputs: make_boxed_func(compiler(gm, inputs)))
    agrees(dynamotor.compile(program, backend=backend), (4, 6, 9, 3))
    assert len(traced) == 4  # forward and backward, with numbers and with symbols


@pytest.mark.parametrize("use", ["numbers", "a bound", "a rest"])
def test_what_a_backend_assumes_of_a_size_guards_the_program(use):
    def backend(gm, inputs):
        (size, *_) = [i for i in inputs if isinstance(i, torch.SymInt)] or [None]
        if size is None:
            return gm.forward
        if use == "numbers":
            return make_fx(gm)(*inputs)
        few = size < 8 if use == "a bound" else size % 3 == 0
        return gm.forward if few else lambda *args: [2 * each for each in gm.forward(*args)]

    def double(x):
        return x * 1.0

    rows = (4, 6, 9, 3, 16)
    compiled = dynamotor.compile(double, backend=backend)
    answers = {n: compiled(torch.ones(n)).mean().item() for n in (*rows, *rows)}
    if use == "numbers":
        assert set(answers.values()) == {1.0}
    elif use == "a bound":
        assert answers == {4: 1.0, 6: 1.0, 9: 2.0, 3: 1.0, 16: 2.0}
    else:
        assert answers == {4: 1.0, 6: 1.0, 9: 1.0, 3: 1.0, 16: 2.0}


def test_a_backend_that_cannot_take_symbols_gets_numbers():
    def backend(gm, inputs):
        return torch.jit.trace(gm, tuple(inputs), check_trace=False)

    def double(x):
        return (x * 2,)

    compiled = dynamotor.compile(double, backend=backend)
    for n in (4, 6, 9):
        x = torch.randn(n)
        torch.testing.assert_close(compiled(x), double(x))
    assert counters["capture"]["sizes kept numbers"] == 1


def test_nodes_have_the_lines_of_the_program():
    seen = []

    def backend(gm, inputs):
        seen.extend(node.stack_trace for node in gm.graph.nodes if node.op.startswith("call"))
        return gm.forward

    dynamotor.compile(program, backend=backend)(torch.randn(4, 3, 2), torch.randn(6, 5))
    assert len(seen) > 3 and all(f'File "{__file__}", line' in trace for trace in seen)
    assert "in program\n    h = torch.nn.functional.gelu" in seen[0]


def test_nodes_know_the_modules_that_they_are_of():
    class Inner(torch.nn.Module):
        def forward(self, x):
            return torch.relu(x)

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Inner()

        def forward(self, x):
            return self.block(x) + 1

    seen = {}

    def backend(gm, inputs):
        calls = [node for node in gm.graph.nodes if node.op.startswith("call")]
        seen.update({node.name: node.meta["nn_module_stack"] for node in calls})
        return gm.forward

    dynamotor.compile(Outer(), backend=backend)(torch.randn(3))
    inner, outer = seen.values()
    assert [cls for _, cls in inner.values()] == [Outer, Inner] and "self.block" in inner
    assert [cls for _, cls in outer.values()] == [Outer]


def test_the_check_mode_tells_a_backend_that_computes_something_else():
    def wrong(gm, inputs):
        for node in gm.graph.nodes:
            node.target = operator.add if node.target is operator.mul else node.target
        gm.recompile()
        return gm.forward

    def double(x):
        return x * 3

    x = torch.randn(4)
    with pytest.raises(dynamotor.BackendError, match="DM411"):
        dynamotor.compile(double, backend=wrong, options={"check": True})(x)
    right = dynamotor.compile(double, backend=lambda gm, inputs: gm.forward, options={"check": True})
    torch.testing.assert_close(right(x), x * 3)
