"""`torch.autograd.grad` inside a compiled function: one node, differentiated again where the program asks for
it.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import grad

import dynamotor
from dynamotor import counters

net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def force(x):
    return -grad(net(x).sum(), x)[0]


def energy_and_force(x):
    energy = net(x).sum()
    (first,) = grad(energy, x, create_graph=True)
    return energy + (first**2).sum()


def penalty(x):
    y = x * 2 + 1
    (first,) = grad(net(y).sum(), y, create_graph=True)
    return ((first.norm(dim=1) - 1) ** 2).mean()


def second_derivative(x):
    (first,) = grad((x**4).sum(), x, create_graph=True)
    (second,) = grad(first.sum(), x, create_graph=True)
    return first * second


def of_parameters(x):
    return sum(g.pow(2).sum() for g in grad(net(x).mean(), list(net.parameters()), create_graph=True))


def unused(x):
    first, none = grad([(x**2).sum()], [x, net[0].bias], allow_unused=True)
    return first if none is None else first * 0


def with_grad_outputs(x):
    y = x.sin()
    return grad(y, x, grad_outputs=torch.ones_like(y) * 3, retain_graph=True)[0] + y


def run(function, x, backend):
    mine = x.clone().requires_grad_()
    net.zero_grad()
    result = dynamotor.compile(function, backend=backend)(mine) if backend else function(mine)
    if result.requires_grad:
        (
            result * torch.linspace(1, 2, result.numel(), dtype=result.dtype).reshape(result.shape)
        ).sum().backward()
    return [
        result.detach(),
        mine.grad,
        *[None if p.grad is None else p.grad.clone() for p in net.parameters()],
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
@pytest.mark.parametrize(
    "function",
    [force, energy_and_force, penalty, second_derivative, of_parameters, unused, with_grad_outputs],
)
def test_one_graph_with_eagers_values_and_gradients(function, backend):
    if backend == "native" and function not in (force, penalty):
        pytest.skip("two functions show the kernels")
    x = torch.randn(3, 4, dtype=torch.float64)
    counters.clear()
    got = run(function, x, backend)
    assert counters["capture"]["graphs"] == 1 and not counters["breaks"]
    assert not any(name.startswith("aot.") for name in counters["fallback"])
    torch.testing.assert_close(got, run(function, x, None))


def test_a_history_outside_is_followed_by_eager():
    def function(x, start):
        return grad((x**2).sum(), start, allow_unused=True)[0] * 2

    start = torch.randn(3, requires_grad=True)
    compiled = dynamotor.compile(function, backend="eager")
    torch.testing.assert_close(compiled(start * 3, start), function(start * 3, start))
    mine = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(compiled(mine, mine), function(mine, mine))
    torch.testing.assert_close(compiled(start * 2, start), function(start * 2, start))


def test_hooks_are_called():
    x = torch.randn(3, requires_grad=True)
    x.register_hook(lambda g: g * 10)

    def function(x):
        return grad((x**2).sum(), x)[0]

    torch.testing.assert_close(dynamotor.compile(function, backend="eager")(x), function(x))


def test_what_eager_refuses():
    def function(x):
        y = (x**2).sum()
        return grad(y, x)[0] + grad(y, x)[0]

    x = torch.randn(3, requires_grad=True)
    for call in (function, dynamotor.compile(function, backend="eager")):
        with pytest.raises(RuntimeError, match="second time"):
            call(x)
