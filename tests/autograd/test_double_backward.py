"""`create_graph=True` through compiled code: gradients of gradients, and of those again, are eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

import dynamotor
from dynamotor import counters

X = torch.linspace(-1.3, 2.1, 24, dtype=torch.float64).sin().reshape(4, 6)


def perceptron(*more):
    return lambda: nn.Sequential(nn.Linear(6, 8), *(one() for one in more), nn.Linear(8, 1)).double()


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


class Decaying(nn.Module):
    """Its gradient needs the buffer's earlier contents; the buffer itself is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(6, dtype=torch.float64))
        self.weight = nn.Parameter(X[1].clone())

    def forward(self, x):
        y = (x * self.scale.clone() * self.weight).tanh()
        self.scale.mul_(1.5)
        return y


def detached(x):
    return (x - x.sin()).detach() * x.sin() + x**3


def without_gradient(x):
    with torch.no_grad():
        scale = x.exp()
    return scale * x * x


def gradient_inside(x):
    return grad((x**3).sum(), x, create_graph=True)[0] * x


def broken(x):
    h = x.sin()
    print(end="")
    return h.relu() * x


PROGRAMS = {
    "tanh": perceptron(nn.Tanh),
    "batch norm": perceptron(lambda: nn.BatchNorm1d(8), nn.Softplus),
    "layer norm": perceptron(lambda: nn.LayerNorm(8), nn.GELU),
    "spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Tanh()).double(),
    "written buffer": Decaying,
    "detached": lambda: detached,
    "without gradient": lambda: without_gradient,
    "own function": lambda: lambda x: Rounded.apply(x) * x,
    "complex values": lambda: lambda x: torch.fft.rfft(x).abs(),
    "two outputs": lambda: lambda x: (x.exp(), x[0].sin() * x[1]),
    "views": lambda: lambda x: (lambda y: (y[0], y[1:].t()))(x.sin() * x),
    "written": lambda: lambda x: (x * 2).add_(1).mul_(x),
    "checkpoint": lambda: lambda x: checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False) * x,
    "gradient inside": lambda: gradient_inside,
    "broken": lambda: broken,
}


def trained(function, x):
    """Two steps with a penalty on the gradient and on its own gradient: all that comes of them."""
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    found = []
    for _ in range(2):
        outputs = function(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum((one * torch.linspace(1, 2, one.numel()).reshape(one.shape)).sum() for one in outputs)
        (first,) = grad(total, x, create_graph=True)
        penalty = (first.norm() - 1) ** 2
        (second,) = grad(penalty, x, create_graph=True)
        (total + penalty + (second**2).sum()).backward()
        found += [first, second, *(one.grad.clone() for one in (x, *parameters))]
    return [*found, *(function.buffers() if isinstance(function, nn.Module) else ())]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_gradients_are_eagers(name):
    if name == "batch norm" and torch.__version__ >= "2.14":
        pytest.skip("this PyTorch refuses a third derivative of batch_norm")
    results = []
    for backend in ("", "aot_eager"):
        torch.manual_seed(1)
        function = PROGRAMS[name]()
        compiled = dynamotor.compile(function, backend=backend) if backend else function
        results.append(trained(compiled, X.clone().requires_grad_()))
    torch.testing.assert_close(results[1], results[0])


def test_a_gradient_penalty_is_compiled():
    torch.manual_seed(1)
    model = perceptron(nn.Tanh)()
    counters.clear()
    want = trained(model, X.clone().requires_grad_())
    model.zero_grad()
    torch.testing.assert_close(trained(dynamotor.compile(model), X.clone().requires_grad_()), want)
    assert not counters["fallback"]


def test_random_numbers_are_those_of_the_forward():
    compiled = dynamotor.compile(lambda x: F.dropout(x.sin(), 0.5) * x, backend="aot_eager")
    x = X.clone().requires_grad_()
    kept = compiled(x) != 0  # other masks are drawn by each call
    torch.manual_seed(3)
    mask = compiled(x) != 0
    torch.manual_seed(3)
    y = compiled(x)
    (first,) = grad(y.sum(), x, create_graph=True)
    want = mask * 2 * (x.cos() * x + x.sin())
    state = torch.get_rng_state()
    torch.testing.assert_close(first, want)
    torch.testing.assert_close(grad(first.sum(), x)[0], grad(want.sum(), x)[0])
    assert torch.equal(state, torch.get_rng_state()) and not torch.equal(kept, mask)


def test_autocast_is_that_of_the_forward():
    torch.manual_seed(1)
    model = perceptron(nn.Tanh)().float()
    found = []
    for function in (model, dynamotor.compile(model, backend="aot_eager")):
        x = X.float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x)
        (first,) = grad(y.float().sum(), x, create_graph=True)
        found.append((first, *grad(first.norm(), x)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_other_sizes_and_inputs_that_come_from_each_other():
    compiled = dynamotor.compile(lambda a, b: (a * b).sin().sum(), backend="aot_eager", dynamic=True)
    for n in range(2, 14):
        found = []
        for function in (lambda a, b: (a * b).sin().sum(), compiled):
            a = torch.linspace(0, 1, n, dtype=torch.float64).requires_grad_()
            (first,) = grad(function(a, a.exp()), a, create_graph=True)
            found.append((first, *grad((first**2).sum(), a)))
        torch.testing.assert_close(found[1], found[0])


def test_an_input_that_was_written_meanwhile_is_refused():
    compiled = dynamotor.compile(lambda a, b: (a + b).relu() ** 3, backend="aot_eager")
    a, b = X.clone().requires_grad_(), X.clone()
    y = compiled(a, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(y.sum(), a, create_graph=True)


def test_a_leaf_that_only_a_gradient_inside_reaches():
    def program(x):
        y = x.detach().requires_grad_()
        return (x * torch.autograd.grad((y.sin() * 1.5).sum(), y)[0]).sum()

    found = []
    for function in (program, dynamotor.compile(program, backend="aot_eager")):
        x = X.clone().requires_grad_()
        found.append(grad(function(x), x, create_graph=True)[0])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_tensors_that_hooks_packed_and_that_are_written_later(backend):
    """The graph ran again with the new contents; the hooks had kept the old ones."""
    found = []
    for compile in (lambda f: f, lambda f: dynamotor.compile(f, backend=backend)):
        held, x = torch.tensor(2.0, dtype=torch.float64), X[0].clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = compile(lambda x, held=held: x * x * held)(x).sum()
        held.add_(1)
        (first,) = grad(loss, x, create_graph=True)
        found.append((first.detach(), *grad(first.sin().sum(), x)))
    torch.testing.assert_close(found[1], found[0])


def test_a_tensor_that_the_forward_alone_read_and_that_is_written_under_hooks():
    held, x = torch.tensor(2.0, dtype=torch.float64), X[0].clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = dynamotor.compile(lambda x: (x + held).exp(), backend="aot_eager")(x).sum()
    held.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(loss, x, create_graph=True)


class Scaled(torch.autograd.Function):
    by = 2.0

    @staticmethod
    def forward(ctx, x):
        ctx.by = Scaled.by
        ctx.save_for_backward(x)
        return x * x * ctx.by

    @staticmethod
    def backward(ctx, g):
        return g * 2 * ctx.saved_tensors[0] * ctx.by


@pytest.mark.parametrize("changes", [False, True])
def test_state_that_the_forward_of_a_function_reads(changes, monkeypatch):
    """A second derivative runs the forward again: a change is refused; a first derivative does not care."""
    compiled = dynamotor.compile(lambda x: Scaled.apply(x.sin()).sum(), backend="aot_eager")
    x = X[0].clone().requires_grad_()
    loss = compiled(x)
    if changes:
        monkeypatch.setattr(Scaled, "by", 7.0)
        with pytest.raises(dynamotor.DynamotorError, match="DM270"):
            grad(loss, x, create_graph=True)
        assert grad(compiled(x), x)[0].allclose(14 * x.sin() * x.cos())
        loss = compiled(x)
        monkeypatch.setattr(Scaled, "by", 2.0)
        torch.testing.assert_close(grad(loss, x)[0], 14 * x.sin() * x.cos())
    else:
        (first,) = grad(loss, x, create_graph=True)
        torch.testing.assert_close(grad(first.sum(), x)[0], 4 * (2 * x).cos())


@pytest.mark.parametrize("hooked", [False, True])
def test_an_input_that_asks_for_a_gradient_only_since_is_refused(hooked):
    """Eager has it in the backward alone; the graph ran again with it in the forward, too."""
    weight = torch.nn.Parameter(torch.full((3,), 1.5), requires_grad=False)

    def fn(x):
        y = x * weight
        if hooked:
            x.register_hook(lambda g: g * 2)
        return y.sin().sum()

    compiled = dynamotor.compile(fn, backend="aot_eager")

    def first(run, **options):
        x = torch.arange(6.0).view(2, 3).requires_grad_()  # a new one: a hook stays on it
        return torch.autograd.grad(run(x), x, **options)

    torch.testing.assert_close(first(compiled, create_graph=True), first(fn, create_graph=True))
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    loss = compiled(x)
    weight.requires_grad_()
    with pytest.raises(dynamotor.DynamotorError, match="DM408"):
        torch.autograd.grad(loss, x, create_graph=True)
    first(compiled, create_graph=True)  # a new call has guards of its own
    torch.testing.assert_close(first(compiled), first(fn))
