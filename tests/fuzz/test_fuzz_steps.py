"""The fuzzer of training steps: its findings stay right, and it sees a guard that is missing."""

from __future__ import annotations

from typing import Any

import pytest

from dynamotor.capture.guards import ConstEquals
from dynamotor.capture.reader import Reader
from dynamotor.step.facts import Facts
from dynamotor.step.reads import Lookups
from fuzz import fuzzers, steps
from fuzz.changes import CHANGES
from fuzz.models import Shared
from fuzz.training import World

# Worlds by seed, with changes that the programs of an earlier day did not see.
FOUND: list[tuple[int, list[list[str]]]] = [
    (245, [[], [], [], [], ["share_a_state"], []]),
    (477, [[], ["pop_a_parameter"], [], []]),
    (208, [[], [], ["scaler_off"], []]),
]


@pytest.mark.parametrize(("seed", "between"), FOUND, ids=str)
def test_what_was_found(seed: int, between: list[list[str]]) -> None:
    assert steps.problems(seed, "aot_eager", between) == []


def test_a_few_programs() -> None:
    found = fuzzers.run({"fuzzer": "steps", "seed": 7, "start": 1, "count": 6})
    assert not found["findings"] and found["tally"]["aot_eager right"] > 0


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_is_seen(name: str) -> None:
    for seed in (3, 6):
        assert steps.problems(seed, "aot_eager", [[], [], [name], [], [name], []]) == []


@pytest.mark.parametrize("seed", range(1000, 1016))
def test_models_with_python_of_their_own(seed: int) -> None:
    assert steps.problems(seed, "aot_eager") == []


def test_constants_of_a_model_that_are_frozen_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, name = Reader.guard, "attributes_of_the_model"
    seed = next(n for n in range(1000, 1200) if type(World(n).model) is Shared)
    between = [[], [], [], [name], [name]]
    assert steps.problems(seed, "aot_eager", between) == []

    def without_constants(self: Reader, row: Any) -> None:
        if not isinstance(row, ConstEquals):
            guard(self, row)

    monkeypatch.setattr(Reader, "guard", without_constants)
    assert steps.problems(seed, "aot_eager", between)


@pytest.mark.slow
def test_a_missing_guard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = {
        name: [n for n in range(200) if World(n).optimizer_name == name] for name in ("attribute", "Adam")
    }

    def found(change: str, optimizer: str) -> bool:
        between = [[], [], [], [], [change], []]
        return any(steps.problems(seed, "aot_eager", between) for seed in worlds[optimizer])

    def always(self: Any) -> bool:
        return True

    assert not found("class_factor", "attribute") and not found("pop_a_parameter", "Adam")
    with monkeypatch.context() as patch:
        patch.setattr(Lookups, "hold", always)
        assert found("class_factor", "attribute")
    with monkeypatch.context() as patch:
        patch.setattr(Facts, "hold", always)
        assert found("pop_a_parameter", "Adam")
