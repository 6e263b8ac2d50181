"""Hooks on gradients that a compiled function registers: seen as in eager, in the graph where that is possible."""

from __future__ import annotations

import copy

import pytest
import torch

import dynamotor
from dynamotor import counters

lstm = torch.nn.LSTM(4, 4, dtype=torch.float32)


def scaled(x):
    y = x * 2
    y.register_hook(lambda g: g * 3 + 1)
    return y.sin(), x.cos()


def squared_and_returned(x):
    y = x * 2
    y.register_hook(lambda g: g * g)
    return y, y.sin()


def looked_at(x):
    y = x * 2
    y.register_hook(lambda g: None)
    return y.sin(), y


def written_after(x):
    y = x * 2
    k = x.detach().sum()
    y.register_hook(lambda g: g.clamp(-0.5, 0.5) * k)
    y.add_(1)
    y.mul_(x)
    return y.sin(), y.view(-1)


def two(x):
    y = x * 2
    y.register_hook(lambda g: g + 1)
    y.register_hook(lambda g: g * y)
    z = y.sin()
    z.register_hook(lambda g: g - 1)
    return z, (y * z).sum()


def on_a_view_that_is_returned(x):  # its gradient goes around a compiled graph
    y = x * 2
    v = y[1:]
    v.register_hook(lambda g: g * 3)
    return y, v


def on_a_view_of_an_argument(x):
    y = x.view(-1)
    y.register_hook(lambda g: g * 3)
    return y, y * 2


def around_an_op_that_eager_runs(x):
    y = x * 2
    h, _ = lstm(y.float())
    y.register_hook(lambda g: g * 3)
    return h * y, y


def on_an_argument(x):
    x.register_hook(lambda g: g * 3)
    return x.sin(), x


def on_an_argument_before_it_is_used(x):
    y = x.exp()
    x.register_hook(lambda g: g * y.detach())
    z = (x * y).cos()
    x.register_hook(lambda g: g + 1)
    return z, y


def on_an_argument_that_is_written(x):
    z = x * 2
    x.register_hook(lambda g: g * 3)
    with torch.no_grad():
        x.mul_(2)
    return z, x * 1


def on_an_argument_of_a_gradient(x):
    x.register_hook(lambda g: g * 3)
    return torch.autograd.grad((x * x).sum(), x, create_graph=True)[0], x * 1


def of_a_wrong_shape(x):
    y = x * 2
    y.register_hook(lambda g: g[0])
    return y.sin(), x


def written_gradient(x):
    y = x * 2
    y.register_hook(lambda g: g.mul_(3))
    return y.sin(), x * 1


def taken_away(x):
    y = x * 2
    handle = y.register_hook(lambda g: g * 3)
    z = y.sin()
    handle.remove()
    return z, y


SINGLE = {
    scaled,
    squared_and_returned,
    looked_at,
    written_after,
    two,
    around_an_op_that_eager_runs,
    on_an_argument,
    on_an_argument_before_it_is_used,
}


def gradients(function, used):
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    try:
        outputs = function(x)
        sum((outputs[i] * torch.rand_like(outputs[i])).sum() for i in used).backward()
    except RuntimeError as error:
        return str(error).split("'")[0]
    return x.grad


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        scaled,
        squared_and_returned,
        looked_at,
        written_after,
        two,
        on_a_view_that_is_returned,
        on_a_view_of_an_argument,
        around_an_op_that_eager_runs,
        on_an_argument,
        on_an_argument_before_it_is_used,
        on_an_argument_that_is_written,
        on_an_argument_of_a_gradient,
        of_a_wrong_shape,
        written_gradient,
        taken_away,
    ],
)
def test_gradients_are_those_of_eager(function, used):
    expected = gradients(function, used)
    for backend in ("eager", "aot_eager"):
        counters.clear()
        got = gradients(dynamotor.compile(function, backend=backend), used)
        assert type(got) is type(expected)
        assert got == expected if isinstance(got, str) else torch.allclose(got, expected), backend
        assert function not in SINGLE or not counters["breaks"]


def test_a_hook_reads_what_holds_at_its_call():
    class Factor:
        value = 2.0

    def function(x, k):
        y = x * 2
        y.register_hook(lambda g: g * k.value)
        return y.sin()

    compiled, k, found = dynamotor.compile(function, backend="aot_eager"), Factor(), []
    for k.value in (2.0, 5.0):
        for call in (function, compiled):
            x = torch.ones(3, requires_grad=True)
            call(x, k).sum().backward()
            found.append(x.grad)
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])


def test_the_mode_is_left_as_it_was():
    """A hook is captured without gradients; the graph must not end so."""

    def function(x):
        y = x * 2
        y.register_hook(lambda g: g * 3)
        return y

    compiled = dynamotor.compile(function, backend="eager")
    compiled(torch.ones(3, requires_grad=True))
    assert torch.is_grad_enabled()


def test_a_hook_on_a_parameter_is_put_on_at_each_call():
    dynamotor.reset()
    counters.clear()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = torch.nn.Linear(3, 3), []

        def forward(self, x):
            self.linear.weight.register_hook(self.note)
            return self.linear(x.tanh())

        def note(self, grad):
            self.seen.append(float(grad.sum()))
            return grad * 2

    torch.manual_seed(0)
    eager = Net()
    mine = copy.deepcopy(eager)
    compiled, x = dynamotor.compile(mine), torch.randn(2, 3)
    for _ in range(3):
        for call in (eager, compiled):
            call(x).sum().backward()
    assert len(eager.seen) == 6 and mine.seen == pytest.approx(eager.seen)
    torch.testing.assert_close(mine.linear.weight.grad, eager.linear.weight.grad)
    assert counters["capture"]["graphs"] == 1 and not counters["breaks"]
