"""What PyTorch's own test suite found, its tests compiled (`python -m bench torch_tests`)."""

from __future__ import annotations

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


def test_saved_tensors_are_unpacked_once():
    """Under a checkpoint a second read of them raises, and a trace read them too."""
    x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0)

    def fn(x, y):
        checkpoint(Kept.apply, x, y, use_reentrant=False).backward()

    dynamotor.compile(fn, backend="eager")(x, y)
    assert Kept.seen == [y] and x.grad == 1


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


@pytest.mark.parametrize("how", ["argument", "no_grad", "returned"])
def test_a_leaf_that_is_made_inside_gathers_its_gradient(how):
    """It was an output of the compiled graph, and its gradient None."""

    def fn(w):
        leaf = torch.ones(2, requires_grad=True)
        with torch.set_grad_enabled(how != "no_grad"):
            out = leaf * w
        out = out + leaf
        if how != "returned":
            out.sum().backward()
        return leaf, out

    grads = []
    for run in (fn, dynamotor.compile(fn, backend="aot_eager")):
        w = torch.tensor([2.0, 3.0], requires_grad=True)
        leaf, out = run(w)
        if how == "returned":
            out.sum().backward()
        assert leaf.is_leaf and leaf.requires_grad
        grads.append([leaf.grad, w.grad])
    assert str(grads[0]) == str(grads[1])


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
