"""`torch.utils.checkpoint` in the graph: the function is inlined, and its values are computed again in
the backward.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import dynamotor
from dynamotor import counters
from dynamotor.base.events import collect

layers = torch.nn.Sequential(
    *[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(3)]
)
norm = torch.nn.BatchNorm1d(16)
log: list[int] = []


def reentrant(x):
    return checkpoint(layers, x, use_reentrant=True)


def not_reentrant(x):
    return checkpoint(layers, x, use_reentrant=False)


def with_keywords(x):
    return checkpoint(lambda y, *, scale: layers(y) * scale, x * 2, use_reentrant=False, scale=3.0) + 1


def nested(x):
    return (
        checkpoint(lambda y: checkpoint(layers, y.sin(), use_reentrant=False).cos(), x, use_reentrant=False)
        * x
    )


def in_parts(x):
    return checkpoint_sequential(layers, 3, x, use_reentrant=False)


def two_results(x):
    first, second = checkpoint(lambda y: (layers(y), y.exp()), x, use_reentrant=False)
    return first * second


def without_gradient(x):
    with torch.no_grad():
        return checkpoint(layers, x, use_reentrant=False) + x.detach()


def gradients(function, x, backend):
    mine = x.clone().requires_grad_()
    layers.zero_grad()
    result = dynamotor.compile(function, backend=backend)(mine) if backend else function(mine)
    if result.requires_grad:
        (result * torch.linspace(0.5, 2, result.numel()).reshape(result.shape)).sum().backward()
    return [
        result.detach(),
        mine.grad,
        *[p.grad if p.grad is None else p.grad.clone() for p in layers.parameters()],
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
@pytest.mark.parametrize(
    "function", [reentrant, not_reentrant, with_keywords, nested, in_parts, two_results, without_gradient]
)
def test_one_graph_with_eagers_gradients(function, backend):
    if function is not not_reentrant and backend == "native":
        pytest.skip("one function shows the kernels")
    x = torch.randn(8, 16)
    counters.clear()
    got = gradients(function, x, backend)
    assert counters["capture"]["graphs"] == 1 and not counters["breaks"]
    torch.testing.assert_close(got, gradients(function, x, None))


@pytest.mark.parametrize("function", [reentrant, not_reentrant, in_parts])
def test_nothing_of_a_checkpoint_is_saved(function):
    x = torch.randn(8, 16)
    with collect("partition") as events:
        gradients(layers, x, "aot_eager")
        gradients(function, x, "aot_eager")
    plain, checkpointed = [event.data["saved_bytes"] for event in events]
    assert checkpointed <= x.nbytes * (2 if function is in_parts else 0) < plain


def test_dropout_is_the_same_in_the_backward():
    def function(x):
        return checkpoint(lambda y: torch.nn.functional.dropout(y, 0.5) * y, x, use_reentrant=False)

    x = torch.ones(64, requires_grad=True)
    result = dynamotor.compile(function, backend="aot_eager")(x)
    result.sum().backward()
    torch.testing.assert_close(x.grad, 2 * result.detach())


def remembers(x):
    log.append(1)
    return layers(x)


def normalises(x):
    return norm(x)


@pytest.mark.parametrize("inner", [remembers, normalises])
def test_what_eager_does_twice_breaks_the_graph(inner):
    x = torch.randn(8, 16)

    def state():
        return [len(log), norm.num_batches_tracked.item()]

    start = state()
    gradients(lambda x: checkpoint(inner, x, use_reentrant=False), x, None)
    once = state()
    gradients(lambda x: checkpoint(inner, x, use_reentrant=False), x, "eager")
    assert [b - a for a, b in zip(start, once)] == [b - a for a, b in zip(once, state())]


def test_a_reentrant_checkpoint_without_gradients_in_its_arguments():
    x = torch.randn(8, 16)
    with pytest.warns(UserWarning, match="requires_grad"):
        assert not reentrant(x).requires_grad
        assert not dynamotor.compile(reentrant, backend="eager")(x).requires_grad


@pytest.mark.regression
def test_a_reentrant_checkpoint_of_what_has_no_gradient():
    """Its result requires one in eager, and a backward raises."""

    def fn(x):
        return checkpoint(lambda x: x.detach() * 2, x, use_reentrant=True)

    for run in (fn, dynamotor.compile(fn, backend="aot_eager")):
        out = run(torch.ones(2, requires_grad=True))
        assert out.requires_grad
        with pytest.raises(RuntimeError, match="not necessary"):
            out.sum().backward()
