"""Objects of the program: properties and slots."""

import pytest
import torch

import dynamotor


class _Held:
    named = property(lambda self: 4.0)


_Held.unnamed = property(lambda self: 4.0)


@pytest.mark.regression
@pytest.mark.parametrize("name", ["named", "unnamed"])
def test_a_property_without_a_setter_says_what_it_was_told(name):
    def write(x, held):
        setattr(held, name, 1)
        return x

    messages = []
    for call in (write, dynamotor.compile(write, backend="eager")):
        with pytest.raises(AttributeError) as error:
            call(torch.ones(1), _Held())
        messages.append(str(error.value))
    assert messages[0] == messages[1]


class Slotted:
    __slots__ = ("a",)


@pytest.mark.regression
def test_a_slot_that_is_set_and_deleted_in_one_call() -> None:
    def function(x: torch.Tensor, thing: Slotted) -> torch.Tensor:
        thing.a = x
        del thing.a
        return x + 1

    compiled, thing = dynamotor.compile(function, backend="eager"), Slotted()
    for _ in range(2):
        compiled(torch.ones(2), thing)
        assert not hasattr(thing, "a")
        thing.a = 1


class _Kind(property):
    def __init__(self, get):
        property.__init__(self, get)


def _entropy(x):
    return torch.distributions.Categorical(logits=x).entropy()


def _logits(x):
    return torch.distributions.Categorical(probs=x.softmax(-1)).logits


def _log_prob(x):
    return torch.distributions.Bernoulli(logits=x[:, 0]).log_prob(torch.ones(4))


@pytest.mark.parametrize("function", [_entropy, _logits, _log_prob])
def test_lazy_attributes_of_distributions_break_nothing(function):
    """`Categorical.logits` is an instance of a class derived from `property`, and distributions ask for its class."""
    compiled = dynamotor.compile(function, backend="eager", fullgraph=True)
    for n in (50, 51):
        x = torch.randn(4, n)
        assert torch.equal(compiled(x), function(x))


def test_an_instance_of_a_class_derived_from_property():
    def f(x):
        kind = _Kind(f)
        return (
            x + isinstance(kind, property) + 2 * isinstance(kind, _Kind) + 4 * isinstance(kind, staticmethod)
        )

    def given_away(x):
        kind = _Kind(f)
        return kind, kind.fget, x + 1

    x = torch.ones(3)
    assert torch.equal(dynamotor.compile(f, backend="eager", fullgraph=True)(x), f(x))
    kind, get, y = dynamotor.compile(given_away, backend="eager")(x)
    assert (type(kind), kind.fget, get) == (_Kind, f, f) and torch.equal(y, x + 1)
