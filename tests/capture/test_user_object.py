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
