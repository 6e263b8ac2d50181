"""Gradients of one output of a graph by another, and many gradients at once."""

from __future__ import annotations

import types

import pytest
import torch

import dynamotor
from dynamotor.autograd.autograd_nodes import Backward

_w, _v = torch.linspace(-1, 1, 9).reshape(3, 3).requires_grad_(), torch.ones(3, requires_grad=True)


def _one_from_another(x):
    hidden = (x @ _w).tanh()
    return hidden, (hidden * _v).sum() ** 2


def _a_chain(x):
    first = (x @ _w).tanh()
    second = first.sin() + first
    return first, second, (second * _v + first).sum()


def _drawn(x):
    hidden = torch.nn.functional.dropout(x @ _w, 0.5)
    return hidden, (hidden * hidden).sum()


@pytest.mark.regression
@pytest.mark.parametrize(
    ("fn", "asks"),
    [
        (_one_from_another, lambda hidden, loss: torch.autograd.grad(loss, hidden)),
        (_one_from_another, lambda hidden, loss: torch.autograd.grad((hidden.exp() * loss).sum(), hidden)),
        (_one_from_another, lambda hidden, loss: (loss.backward(inputs=[hidden]), hidden.grad)),
        (
            _one_from_another,
            lambda hidden, loss: torch.autograd.grad(
                torch.autograd.grad(loss, hidden, create_graph=True)[0].sin().sum(), [_w, _v]
            ),
        ),
        (
            _one_from_another,
            lambda hidden, loss: [
                torch.autograd.grad(loss, one, retain_graph=True) for one in (hidden, _w, hidden)
            ],
        ),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(loss, first)),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(loss, second)),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(second.sum() + loss, first)),
        (_one_from_another, lambda hidden, loss: torch.autograd.grad(loss, [hidden, _w])),
        (
            _one_from_another,
            lambda hidden, loss: torch.autograd.grad(loss + hidden.exp().sum(), [hidden, _w]),
        ),
        (
            _one_from_another,
            lambda hidden, loss: torch.autograd.grad(
                sum(g.sin().sum() for g in torch.autograd.grad(loss, [hidden, _w, _v], create_graph=True)), _w
            ),
        ),
        (
            _one_from_another,
            lambda hidden, loss: torch.autograd.grad(
                loss, [hidden, _w], torch.ones(4), is_grads_batched=True
            ),
        ),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(loss, [first, second])),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(loss + second.sum(), [_w, second, first])),
        (_a_chain, lambda first, second, loss: torch.autograd.grad(loss, [second, _v])),
        (_drawn, lambda hidden, loss: (torch.autograd.grad(loss, hidden)[0] == 2 * hidden).all()),
    ],
)
def test_gradients_of_one_output_by_another(fn, asks):
    """Both come from one node: it was "not used in the graph", or None."""
    x = torch.linspace(0, 1, 6).reshape(2, 3)
    expected, found = (asks(*run(x)) for run in (fn, dynamotor.compile(fn, backend="aot_eager")))
    torch.testing.assert_close(found, expected)


@pytest.mark.regression
def test_hooks_where_the_gradient_of_another_output_comes():
    """They are refused before they are called with None."""
    hidden, loss = dynamotor.compile(_one_from_another, backend="aot_eager")(torch.ones(2, 3))
    hidden.register_hook(lambda grad: grad * 2)
    with pytest.raises(dynamotor.BackendError, match="DM403"):
        loss.backward()


def _batched(fn, x):
    out = fn(x)
    return torch.autograd.grad(out, x, torch.eye(3), is_grads_batched=True)


def _batched_twice(fn, x):
    (rows,) = torch.autograd.grad(fn(x), x, torch.eye(3), is_grads_batched=True, create_graph=True)
    return torch.autograd.grad(rows.sin().sum(), x)


def _under_vmap(fn, x):
    out = fn(x)
    return torch.vmap(lambda v: torch.autograd.grad(out, x, v, retain_graph=True)[0])(torch.eye(3))


@pytest.mark.regression
@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("asks", [_batched, _batched_twice, _under_vmap])
def test_gradients_of_many_at_once(asks, backend):
    """Generated kernels have no batches: "the tensor has no storage"."""

    def fn(x):
        return (x @ _w.detach()).tanh()

    x = torch.linspace(0, 1, 3).requires_grad_()
    torch.testing.assert_close(asks(dynamotor.compile(fn, backend=backend), x), asks(fn, x))


@pytest.mark.regression
def test_gradients_of_many_by_another_output():
    said = []
    for run in (_one_from_another, dynamotor.compile(_one_from_another, backend="aot_eager")):
        hidden, loss = run(torch.linspace(0, 1, 6).reshape(2, 3))
        said.append(torch.autograd.grad(loss, hidden, torch.ones(4), is_grads_batched=True)[0])
    torch.testing.assert_close(*said)


@pytest.mark.regression
def test_gradients_of_many_where_numbers_are_drawn():
    """Kernels raised "the tensor has no storage"."""
    x = torch.ones(3, requires_grad=True)
    out = dynamotor.compile(lambda x: torch.nn.functional.dropout(x, 0.5).tanh(), backend="native")(x)
    with pytest.raises(dynamotor.BackendError, match="DM408.*many gradients at once"):
        torch.autograd.grad(out, x, torch.eye(3), is_grads_batched=True)


@pytest.mark.regression
def test_errors_of_many_gradients_where_nothing_is_drawn():
    """They were called an error of a graph that draws random numbers."""

    def refuse(*_):
        raise RuntimeError("words of the backend")

    node = types.SimpleNamespace(draws=False, _run=refuse)
    with pytest.raises(RuntimeError, match="^words of the backend"):
        Backward._run_many(node, [], [], [])
