"""Nodes of compiled graphs in autograd: saved tensors, hooks, repeated and separate backwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dynamotor


class Kept(torch.autograd.Function):
    seen: list[torch.Tensor] = []

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Kept.seen += ctx.saved_tensors
        return grad, None


@pytest.mark.regression
def test_saved_tensors_are_unpacked_once():
    """Under a checkpoint a second read of them raises, and a trace read them too."""
    x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0)

    def fn(x, y):
        checkpoint(Kept.apply, x, y, use_reentrant=False).backward()

    dynamotor.compile(fn, backend="eager")(x, y)
    assert Kept.seen == [y] and x.grad == 1


@pytest.mark.regression
def test_what_a_node_saved_is_unpacked_when_it_is_read():
    seen = []

    def read(node):
        return node._saved_result + 1

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: seen.append(x) or x):
        node = torch.ones(2, requires_grad=True).exp().grad_fn
    compiled = dynamotor.compile(read, backend="eager")
    for calls in (1, 2, 3):
        compiled(node)
        assert len(seen) == calls


@pytest.mark.regression
@pytest.mark.parametrize("program", [lambda x: x.clone(), lambda x: (x.t(), x + x), lambda x: x * 2])
def test_a_second_backward_where_nothing_was_saved(program):
    """Autograd frees nothing then, and may be asked again."""
    said = []
    for run in (program, dynamotor.compile(program, backend="aot_eager")):
        x = torch.ones(2, 2, requires_grad=True)
        out = run(x)
        out = out[0] if isinstance(out, tuple) else out
        try:
            for _ in range(2):
                out.backward(torch.ones(2, 2))
            said.append(str(x.grad))
        except RuntimeError as error:
            said.append(str(error)[:50])
    assert said[0] == said[1]


@pytest.mark.regression
@pytest.mark.parametrize("uses", [lambda z, h: z.register_hook(h), lambda z, h: z.retain_grad()])
def test_hooks_on_what_others_were_calculated_from(uses):
    """The gradient from the others stays inside of a compiled graph: a hook was not called, without a word."""

    def fn(x, seen):
        z = x * 2
        out = z.sin()
        uses(z, seen.append)
        return (out, z) if z.retains_grad else (out,)

    said = []
    for run in (fn, dynamotor.compile(fn, backend="aot_eager")):
        seen = []
        out, *more = run(torch.ones(2, requires_grad=True), seen)
        out.sum().backward()
        said.append(str((seen, [z.grad for z in more])))
    assert said[0] == said[1]


@pytest.mark.regression
def test_hooks_on_an_output_that_is_gone():
    z, out = dynamotor.compile(lambda x: (z := x * 2, z.sin()), backend="aot_eager")(
        torch.ones(2, requires_grad=True)
    )
    z.register_hook(lambda grad: None)
    del z
    with pytest.raises(dynamotor.BackendError, match="DM403"):
        out.sum().backward()


@pytest.mark.regression
def test_gradients_of_what_was_calculated_on_the_way():
    def fn(x, w):
        between = w * 2
        out = (between * x).sin().sum()
        (grad,) = torch.autograd.grad(out, between)
        return grad

    x, w = torch.ones(2), torch.ones(2, requires_grad=True) * 1
    for run in (fn, dynamotor.compile(fn, backend="aot_eager")):
        assert torch.equal(run(x, w), torch.full((2,), torch.tensor(2.0).cos()))


@pytest.mark.regression
def test_a_copy_has_the_gradient():
    x = torch.zeros(2)
    compiled = dynamotor.compile(copy.deepcopy, backend="eager")
    assert compiled(x).grad is None
    x.grad = torch.ones(2)
    assert compiled(x).grad.tolist() == [1, 1]


@pytest.mark.regression
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_backwards_of_two_outputs(backend: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = (x * w).sin()
        return h.sum(), (h * h).sum()

    seen = []
    for run in (function, dynamotor.compile(function, backend=backend)):
        x, w = torch.arange(5.0, requires_grad=True), torch.ones(5, requires_grad=True)
        said: list[Any] = []
        for keeps in ((True, True, False), (True, False, False)):
            first, second = run(x, w)
            try:
                for output, keep in zip((first, second, first), keeps):
                    output.backward(retain_graph=keep)
                    said.append([x.grad.clone(), w.grad.clone()])
            except RuntimeError as error:
                said.append(str(error)[:40])
        seen.append(said)
    torch.testing.assert_close(seen[1][:-1], seen[0][:-1])
    assert seen[1][-1] == seen[0][-1]
