"""After compiling, something that the program read changes: the next call gives eager's result."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dynamotor

SCALE = 2.0


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.factor = 1.5
        self.settings = {"bias": 0.25}
        self.shifts = [1.0, 2.0]

    def activate(self, x):
        return torch.relu(x)

    def forward(self, x, bonus=0.5):
        x = self.norm(self.linear(x)) * self.factor + self.settings["bias"] + bonus
        for shift in self.shifts:
            x = x + shift
        return self.activate(x) * SCALE


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.extra = nn.ModuleList([nn.Linear(6, 6), nn.Tanh()])

    def forward(self, x):
        x = self.inner(x)
        for layer in self.extra:
            x = layer(x)
        return x


class Other(Inner):
    def forward(self, x, bonus=0.5):
        return x - 7.0


def set_global(value):
    def change(model):
        globals()["SCALE"] = value

    return change


def replace_method(name, function):
    def change(model):
        setattr(Inner, name, function)

    return change


@pytest.fixture(autouse=True)
def _restore():
    scale, forward, activate, defaults = SCALE, Inner.forward, Inner.activate, Inner.forward.__defaults__
    yield
    globals()["SCALE"] = scale
    Inner.forward, Inner.activate = forward, activate
    Inner.forward.__defaults__ = defaults
    if "__call__" in vars(Inner):
        del Inner.__call__


def attribute(path, value):
    def change(model):
        target = model.get_submodule(path.rpartition(".")[0])
        setattr(target, path.rpartition(".")[2], value)

    return change


def in_place(path, function):
    return lambda model: function(model.get_parameter(path))


def new_defaults(model):
    Inner.forward.__defaults__ = (9.0,)


def forward_hook(model):
    model.inner.linear.register_forward_hook(lambda m, args, out: out * 3)


def pre_hook(model):
    model.inner.register_forward_pre_hook(lambda m, args: (args[0] + 1,))


def backward_hook(model):
    model.inner.linear.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi))


def instance_forward(model):
    model.inner.forward = lambda x, bonus=0.5: x * 11


def swap_class(model):
    model.inner.__class__ = Other


CHANGES = {
    "attribute of a submodule": attribute("inner.factor", -2.5),
    "attribute of another type": attribute("inner.factor", 3),
    "an attribute becomes a tensor": attribute("inner.factor", torch.tensor(0.75, dtype=torch.float64)),
    "entry of a dict attribute": lambda m: m.inner.settings.update(bias=5.0),
    "entry of a list attribute": lambda m: m.inner.shifts.__setitem__(0, 4.0),
    "length of a list attribute": lambda m: m.inner.shifts.append(3.0),
    "global": set_global(3.0),
    "default argument": new_defaults,
    "method of the class": replace_method("activate", lambda self, x: torch.sigmoid(x)),
    "forward of the class": replace_method("forward", lambda self, x, bonus=0.5: x * 13),
    "forward of the instance": instance_forward,
    "method shadowed on the instance": lambda m: setattr(m.inner, "activate", torch.sin),
    "class of the instance": swap_class,
    "training off": lambda m: m.eval(),
    "training off for a part": lambda m: m.inner.norm.eval(),
    "forward hook": forward_hook,
    "forward pre-hook": pre_hook,
    "full backward hook": backward_hook,
    "submodule replaced": lambda m: setattr(
        m.inner, "linear", nn.Linear(6, 6, bias=False, dtype=torch.float64)
    ),
    "submodule appended": lambda m: m.extra.append(nn.Sigmoid()),
    "parameter replaced": lambda m: setattr(
        m.inner.linear, "weight", nn.Parameter(torch.ones(6, 6, dtype=torch.float64))
    ),
    "parameter written in place": in_place("inner.linear.weight", lambda p: p.data.mul_(3)),
    "parameter's data replaced": in_place("inner.linear.weight", lambda p: setattr(p, "data", p.data * 2)),
    "parameter frozen": in_place("inner.linear.weight", lambda p: p.requires_grad_(False)),
    "bias removed": lambda m: setattr(m.inner.linear, "bias", None),
    "dtype of the whole module": lambda m: m.float(),
    "buffer written": lambda m: m.inner.norm.running_mean.fill_(2.0),
}


def result(model, x, train=True):
    """Output and gradients, or the kind of exception."""
    model.zero_grad()
    x = x.to(next(model.parameters()).dtype).clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(a, b, exact=None):
    """Float32 results are compared with float64 (`exact`), beside eager's own error; a sum that vanishes (the
    gradient of a bias before a batch norm), beside the rounding of its five terms.
    """
    most = max(z.abs().max() for z in exact or b if z is not None and z.numel())
    assert len(a) == len(b)
    for x, y, z in zip(a, b, exact or b):
        assert (x is None) == (y is None)
        if x is not None and x.dtype is torch.float32:
            assert y.dtype is x.dtype and z.dtype is torch.float64
            assert (x - z).abs().max() <= 4 * (y - z).abs().max() + (
                1e-6 * z.abs().max() if z.abs().max() > 1e-9 else 5 * 2**-24 * most
            )
        elif x is not None:
            torch.testing.assert_close(x, y)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_on_the_next_call(name, backend):
    torch.manual_seed(0)
    model = Outer().double()  # double: rounding is far below what any change does
    twin = copy.deepcopy(model)
    compiled = dynamotor.compile(model, backend=backend)
    x = torch.randn(5, 6, dtype=torch.float64)
    same(result(compiled, x), result(twin, x))
    same(result(compiled, x), result(twin, x))
    for m in (model, twin):
        torch.manual_seed(1)
        CHANGES[name](m)
    for _ in range(2):
        exact = result(copy.deepcopy(twin).double(), x)
        same(result(compiled, x), result(twin, x), exact)
    for a, b in zip(model.buffers(), twin.buffers()):
        torch.testing.assert_close(a, b)


INPUTS = {
    "rank": lambda: torch.randn(2, 3, 4),
    "shape": lambda: torch.randn(7, 4),
    "dtype double": lambda: torch.randn(3, 4, dtype=torch.float64),
    "dtype int": lambda: torch.arange(12).reshape(3, 4),
    "strides": lambda: torch.randn(4, 3).t(),
    "a slice": lambda: torch.randn(6, 8)[::2, ::2],
    "requires grad": lambda: torch.randn(3, 4, requires_grad=True),
    "zero size": lambda: torch.randn(0, 4),
    "a parameter": lambda: nn.Parameter(torch.randn(3, 4)),
}


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("name", INPUTS)
def test_a_new_kind_of_input_is_seen(name, backend):
    def program(x):
        y = x * 2 + 1
        return y.contiguous(), y.sum(-1), (x.shape, x.dtype, x.stride(), x.requires_grad)

    compiled = dynamotor.compile(program, backend=backend)
    for x in (torch.randn(3, 4), INPUTS[name](), torch.randn(3, 4)):
        ours, expected = compiled(x), program(x)
        assert ours[2] == expected[2]
        for a, b in zip(ours[:2], expected[:2]):
            assert a.dtype == b.dtype and a.stride() == b.stride() and a.requires_grad == b.requires_grad
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_grad_mode_and_autocast_are_seen(backend):
    model = nn.Linear(8, 8)
    compiled = dynamotor.compile(model, backend=backend)
    x = torch.randn(4, 8)
    for _ in range(2):
        assert compiled(x).requires_grad
        with torch.no_grad():
            assert not compiled(x).requires_grad
        with torch.inference_mode():
            assert compiled(x).is_inference()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, expected = compiled(x), model(x)
            assert ours.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_closure_cells_and_argument_kinds_are_seen(backend):
    factor = 2.0
    mode = {"sign": 1}

    def program(x, *rest, scale=1.0, **more):
        y = x * factor * mode["sign"] * scale
        for r in rest:
            y = y + r
        return y + sum(more.values())

    compiled = dynamotor.compile(program, backend=backend)
    x = torch.randn(4)
    calls = [
        lambda f: f(x),
        lambda f: f(x, 1.0),
        lambda f: f(x, 1.0, 2),
        lambda f: f(x, scale=3.0),
        lambda f: f(x, scale=3),
        lambda f: f(x, a=1, b=2),
        lambda f: f(x, b=2, a=torch.ones(4)),
        lambda f: f(x, x),
        lambda f: f(x, torch.ones(4)),
    ]
    for call in calls:
        torch.testing.assert_close(call(compiled), call(program))
    factor = 5.0
    torch.testing.assert_close(compiled(x), program(x))
    mode["sign"] = -1
    torch.testing.assert_close(compiled(x), program(x))


def test_a_default_dtype_and_threads_of_the_process_are_seen():
    def program(x):
        return x + torch.ones(3)

    compiled = dynamotor.compile(program)
    x = torch.zeros(3)
    assert compiled(x).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert compiled(x).dtype == program(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert compiled(x).dtype == torch.float32
