"""Tensors that become leaves of autograd inside of compiled code, or stop to have a history, are eager's."""

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters


def _layer():
    torch.manual_seed(5)
    return torch.nn.Linear(4, 4)


def attribute_is_set(layer, x):
    h = x * 2
    h.requires_grad = True
    return layer(h).relu(), h


def method_on_a_view(layer, x):
    h = x[:, None]
    h.requires_grad_()
    return layer(h).relu().cos(), h


def input_becomes_leaf(layer, x):
    x.requires_grad_()
    return layer(x) * x, x


def parameter_is_frozen_for_a_part(layer, x):
    layer.requires_grad_(False)
    y = layer(x)
    layer.requires_grad_(True)
    return (y + layer(x).sin(),)


def leaves_are_made(layer, x):
    w, v = torch.ones(4, requires_grad=True), torch.tensor([1.0, 2, 3, 4], requires_grad=True)
    u = torch.full((4,), 2.0, requires_grad=True)
    return layer(x * w * v) + x.new_zeros(4, requires_grad=True) + u, w, v, u


def gradient_of_a_made_leaf(layer, x):
    w = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(layer(w).square().sum(), w)
    return (x + g,)


def detached_in_place(layer, x):
    y = layer(x)
    y.detach_()
    y.mul_(2)
    return layer(y) + x, y


PROGRAMS = (
    attribute_is_set, method_on_a_view, input_becomes_leaf, parameter_is_frozen_for_a_part, leaves_are_made,
    gradient_of_a_made_leaf, detached_in_place,
)  # fmt: skip


def _outcome(program, layer, call):
    x = torch.linspace(-1, 2, 12).view(3, 4)
    outs = call(layer, x)
    sum(
        (out.square().sum() for out in outs if out.requires_grad), torch.zeros((), requires_grad=True)
    ).backward()
    facts = [
        (out.detach(), out.requires_grad, out.is_leaf, out.grad if out.is_leaf else None) for out in outs
    ]
    return facts, x.grad, [(p.grad, p.requires_grad) for p in layer.parameters()]


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_leaves_and_their_gradients_are_eagers(program, backend):
    dynamotor.reset()
    breaks = counters["breaks"].total()
    compiled = dynamotor.compile(program, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(
            _outcome(program, _layer(), compiled), _outcome(program, _layer(), program), equal_nan=True
        )
    assert counters["breaks"].total() == breaks


def views_hold_the_history(layer, x):
    y = layer(x)
    v = y[0]
    y.detach_()
    y.mul_(2)
    return v * x, y


def used_before(layer, x):
    y = layer(x)
    z = y.sin()
    y.detach_()
    return y + x, z


def view_is_detached(layer, x):
    v = layer(x)[0]
    v.detach_()
    return (v * x,)


def set_where_there_is_a_history(layer, x):
    h = layer(x)
    h.requires_grad = True
    return (h,)


@pytest.mark.parametrize(
    "program", [views_hold_the_history, used_before, view_is_detached, set_where_there_is_a_history]
)
def test_refused_changes_end_as_in_eager(program):
    def outcome(call):
        try:
            return _outcome(program, _layer(), call)
        except RuntimeError as error:
            return [str(error)[:40]]

    dynamotor.reset()
    ours, eager = outcome(dynamotor.compile(program)), outcome(program)
    assert ours == eager if type(eager) is list else torch.testing.assert_close(ours, eager) is None
