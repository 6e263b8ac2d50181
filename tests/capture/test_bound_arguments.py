"""Guard programs that are bound to the arguments of the last call: they answer as a walk from the arguments does."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

import dynamotor
from dynamotor import _C
from dynamotor.base.events import counters
from dynamotor.capture.dispatch import MANY, compile_program
from dynamotor.capture.guards import Absent, ConstEquals, TensorMatch, TypeIs
from dynamotor.capture.source import Arg, DictItem, InstanceDict, SeqItem

SELF = Arg(0, "self")
WEIGHT = DictItem(InstanceDict(SELF), "weight")


class Model:
    """Many attributes, a list among them."""

    def __init__(self) -> None:
        for i in range(MANY):
            setattr(self, f"a{i}", i)
        self.weight, self.parts = torch.ones(2), [Part()]


class Part:
    scale = 2


def program_of(model: Model) -> _C.GuardProgram:
    fields = InstanceDict(SELF)
    part = SeqItem(DictItem(fields, "parts"), 0)
    guards = [
        TypeIs(SELF, Model),
        *(ConstEquals(DictItem(fields, f"a{i}"), i) for i in range(MANY)),
        TensorMatch.of(WEIGHT, model.weight),
        TypeIs(part, Part),
        Absent(DictItem(InstanceDict(part), "scale")),
    ]
    return compile_program(guards, [WEIGHT, Arg(1, "x")])


CHANGES: list[Callable[[Model], object]] = [
    lambda m: setattr(m, "a3", 4),
    lambda m: delattr(m, "a5"),
    lambda m: setattr(m, "weight", torch.ones(3)),
    lambda m: setattr(m, "parts", [Model()]),
    lambda m: m.parts.clear(),
    lambda m: setattr(m.parts[0], "scale", 3),
    lambda m: setattr(m.parts[0], "__class__", type("Other", (Part,), {})),
    lambda m: setattr(m, "__class__", type("OtherModel", (Model,), {})),
    lambda m: setattr(m, "__dict__", {"a0": 0}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: Callable[[Model], object]) -> None:
    model = Model()
    program = program_of(model)
    assert program.settled is not None
    for x in range(3):
        found = program.check((model, x))
        assert found is not None and found[0] is model.weight and found[1] == x
    assert program.settled.sizes["rebinds"] == 1
    change(model)
    assert program.check((model, 0)) is None


def test_a_new_value_of_the_same_kind_is_found() -> None:
    model = Model()
    program = program_of(model)
    for _ in range(3):
        model.weight, model.parts = torch.zeros(2), [Part()]
        found = program.check((model, 1))
        assert found is not None and found[0] is model.weight


def test_models_in_turn_are_told_apart() -> None:
    models = [Model() for _ in range(3)]
    program = program_of(models[0])
    models[2].a7 = 8  # type: ignore[attr-defined]
    for _ in range(50):
        for k, model in enumerate(models):
            found = program.check((model, k))
            assert (found is None) if k == 2 else (found is not None and found[0] is model.weight)
    assert program.settled is not None and program.settled.sizes["rebinds"] < 40


def test_the_argument_is_not_kept_alive() -> None:
    model = Model()
    program = program_of(model)
    assert program.check((model, 0)) is not None
    ends = [weakref.ref(model), weakref.ref(model.parts[0]), weakref.ref(model.weight.untyped_storage())]
    del model
    gc.collect()
    assert not any(end() for end in ends)
    again = Model()
    found = program.check((again, 0))
    assert found is not None and found[0] is again.weight


def test_containers_and_few_sources_are_walked() -> None:
    fields = [ConstEquals(DictItem(Arg(0, "d"), f"a{i}"), i) for i in range(MANY)]
    program = compile_program([TypeIs(Arg(0, "d"), dict), *fields], [])
    assert program.settled is None and program.check(({f"a{i}": i for i in range(MANY)},)) is not None
    few = compile_program([TypeIs(SELF, Model), ConstEquals(DictItem(InstanceDict(SELF), "a0"), 0)], [])
    assert few.settled is None


def test_threads_with_models_of_their_own() -> None:
    models = [Model() for _ in range(4)]
    program = program_of(models[0])
    wrong = []

    def calls(model: Model) -> None:
        for k in range(300):
            model.weight = torch.full((2,), float(k))
            found = program.check((model, k))
            if found is None or found[0] is not model.weight or found[1] != k:
                wrong.append(k)

    threads = [threading.Thread(target=calls, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_module_as_an_argument_is_followed() -> None:
    """Hooks, swapped layers, replaced parameters and copies of a module that a compiled function takes."""

    @dynamotor.compile(backend="eager")
    def step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    layers = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()) for _ in range(3)]
    model, x = torch.nn.Sequential(*layers), torch.randn(2, 3)
    for _ in range(3):
        assert torch.equal(step(model, x), model(x))
    captured = counters["frames"]["captured"]
    other = copy.deepcopy(model)
    other[0][0].weight.data.mul_(2)
    for _ in range(20):
        assert torch.equal(step(other, x), other(x)) and torch.equal(step(model, x), model(x))
    assert counters["frames"]["captured"] <= captured + 1
    model[1][0].weight = torch.nn.Parameter(torch.randn(3, 3))
    assert torch.equal(step(model, x), model(x))
    model[2].register_forward_hook(lambda module, args, result: result + 1)
    assert torch.equal(step(model, x), model(x))
    model[1][1] = torch.nn.Tanh()
    assert torch.equal(step(model, x), model(x))
