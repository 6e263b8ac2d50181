"""Classes of parameters that change nothing are captured as parameters are."""

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters


class Plain(torch.nn.Parameter):
    """A name alone."""


class WithNumber(torch.nn.Parameter):
    def __new__(cls, data, scale=2):
        made = super().__new__(cls, data)
        made.scale = scale
        return made


class WithMethod(torch.nn.Parameter):
    def twice(self):
        return self * 2


class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight = kind(torch.randn(3))

    def forward(self, x):
        out = x * self.weight + getattr(self.weight, "scale", 1)
        return out, isinstance(self.weight, Plain), type(self.weight).__name__, self.weight, self.weight * 2


@pytest.mark.parametrize("kind", [Plain, WithNumber, WithMethod])
def test_parameters_of_a_class_of_their_own(kind):
    dynamotor.reset()
    model, x = Model(kind), torch.ones(3)
    compiled = dynamotor.compile(model)
    for i in range(4):
        results = []
        for call in (compiled, model):
            out = call(x)
            (gradient,) = torch.autograd.grad(out[0].sum(), [model.weight])
            results.append((*out, gradient))
        for ours, eager in zip(*results, strict=True):
            assert type(ours) is type(eager)
            assert torch.equal(ours, eager) if isinstance(ours, torch.Tensor) else ours == eager
        assert results[0][3] is model.weight
        if kind is WithNumber:
            model.weight.scale = i + 5
        elif i == 1:
            model.weight = torch.nn.Parameter(torch.randn(3))  # another class
    assert not counters["breaks"]


class Checked(torch.nn.Parameter):
    """Looks at the call, then leaves it to the base, which has turned the protocol off."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert len(types) > 0
        return super().__torch_function__(func, types, args, kwargs or {})

    @property
    def doubled(self):
        return self.detach() * 2


def test_a_parameter_that_hands_calls_to_its_base():
    dynamotor.reset()
    weight = Checked(torch.randn(3, 4))

    def call(x):
        return torch.nn.functional.linear(x, weight).sin() + weight.doubled.sum(), weight.t()

    x = torch.randn(2, 4)
    compiled = dynamotor.compile(call, fullgraph=True)
    for _ in range(2):
        (want, _), (got, view) = call(x), compiled(x)
        assert type(got) is type(want)
        torch.testing.assert_close(got, want)
        assert type(view) is type(call(x)[1])
        ours, eager = (torch.autograd.grad(out.sum(), weight)[0] for out in (got, want))
        assert type(ours) is type(eager)
        torch.testing.assert_close(ours, eager)


class Named(torch.Tensor):
    """Without the protocol of functions: results are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def own(self):
        return self.sin()


def test_a_subclass_without_the_protocol_is_a_plain_tensor():
    dynamotor.reset()
    x = torch.randn(3).as_subclass(Named)
    compiled = dynamotor.compile(lambda x: (x.own() + x.shape[0], x, x.add_(1)), fullgraph=True)
    twin = x.clone().as_subclass(Named)
    want, got = (x.own() + 3, x, x.add_(1)), compiled(twin)
    for one, other in zip(want, got):
        assert type(one) is type(other)
        torch.testing.assert_close(one, other)
    assert got[1] is twin is got[2]


class Labelled(torch.Tensor):
    """Made of a tensor, as `Labelled(x)`."""

    label = "new"


def test_an_instance_made_of_a_tensor_shares_its_memory_and_history():
    def make(x):
        made = Labelled(x * 2)
        return made, made.label, made + 1, type(made + 1) is Labelled

    x = torch.randn(3, requires_grad=True)
    made, label, more, kind = dynamotor.compile(make, fullgraph=True)(x)
    assert type(made) is Labelled and type(more) is Labelled and label == "new" and kind
    assert torch.equal(
        torch.autograd.grad((made * more).sum(), x)[0],
        torch.autograd.grad((make(x)[0] * make(x)[2]).sum(), x)[0],
    )


def test_an_instance_made_of_numbers_is_left_to_eager():
    def make(x):
        return Labelled([1.0, 2.0]) + x

    assert torch.equal(dynamotor.compile(make)(torch.ones(2)), torch.tensor([2.0, 3.0]))


class Stored(torch.nn.Parameter):
    """Changes no torch call, and has a method of its own (as bitsandbytes' weights)."""

    def own(self):
        return self.data


@pytest.mark.parametrize("make", [torch.nn.Parameter, Stored])
def test_data_that_is_set_to_its_own_memory_stays(make):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = make(torch.randn(4, 4), requires_grad=False)
            self.stored = self.weight.data

        def forward(self, x):
            y = x @ self.weight
            self.weight.data = self.stored
            return y.relu()

    dynamotor.reset()
    layer, x = Layer(), torch.randn(2, 4)
    compiled = dynamotor.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    compiled = dynamotor.compile(layer)
    layer.stored = torch.ones(4, 4)  # other memory
    wanted = (x @ layer.weight).relu()
    torch.testing.assert_close(compiled(x), wanted)
    assert layer.weight.data_ptr() == layer.stored.data_ptr()
    torch.testing.assert_close(compiled(x), (x @ torch.ones(4, 4)).relu())


def test_attributes_of_autograd_are_set_on_parameters_of_a_subclass():
    def fn(x):
        weight.grad = None
        return (x @ weight).sum()

    dynamotor.reset()
    weight = Stored(torch.randn(4, 4))
    weight.grad, x = torch.ones(4, 4), torch.randn(2, 4)
    dynamotor.compile(fn, fullgraph=True)(x).backward()
    torch.testing.assert_close(weight.grad, x.sum(0)[:, None].expand(4, 4))
    assert type(weight) is Stored


def moves_the_tensor(w, stored, x):
    w.data = x * 2
    w.data = stored
    return w + 1


def moves_the_stored(w, stored, x):
    stored.data = x * 2
    w.data = stored
    return w + 1


def swaps(w, stored, x):
    torch.utils.swap_tensors(w, x)
    w.data = stored
    return w + 1


@pytest.mark.parametrize("program", [moves_the_tensor, moves_the_stored, swaps])
@pytest.mark.parametrize("make", [torch.Tensor.clone, torch.nn.Parameter, Stored])
def test_memory_that_the_program_moved_before_counts(make, program):
    """The objects outside have one memory when the call begins, and others where `.data` is set."""
    ends = []
    for run in (program, dynamotor.compile(program)):
        w, x = make(torch.arange(3.0)), torch.arange(3.0) + 5
        stored = w.data
        with torch.no_grad():
            result = run(w, stored, make(x) if program is swaps else x)
        ends.append((result, w.detach().clone(), stored.clone(), w.data_ptr() == stored.data_ptr()))
        assert type(w) is type(make(x))
    torch.testing.assert_close(*ends)
