"""Classes of the program: operators on them, and aliases of typing."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, List  # noqa: UP035

import pytest
import torch
from every_backend import same

import dynamotor


class Registry:
    table: dict[str, int] = {}

    def __class_getitem__(cls, name: str) -> int:
        cls.table["asked"] += 1
        return cls.table[name]


class Table(type):
    table: dict[str, int] = {}

    def __getitem__(cls, name: str) -> int:
        cls.table["asked"] += 1
        return cls.table[name]

    def __or__(cls, other: Any) -> Any:
        return cls.table["a"]

    def __int__(cls) -> int:
        return cls.table["a"]

    def __repr__(cls) -> str:
        return str(cls.table["a"])


class OfTable(metaclass=Table):
    pass


@pytest.mark.regression
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x * Registry["a"],
        lambda x: x * OfTable["a"],
        lambda x: x * (OfTable | 3),
        lambda x: x * int(OfTable),  # type: ignore[call-overload]
        lambda x: x * len(repr(OfTable)) + int(f"{OfTable}"),
    ],
    ids=["class_getitem", "getitem_of_the_metaclass", "or", "int", "repr"],
)
def test_operators_on_classes_that_a_program_wrote_run_at_each_call(
    program: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """They were run once, while compiling, and their result was a constant."""
    results = []
    for function in (program, dynamotor.compile(program, backend="eager")):
        Registry.table = Table.table = {"a": 2, "asked": 0}
        found = [function(torch.ones(2)), function(torch.ones(2))]
        Registry.table["a"] = 7
        results.append(([*found, function(torch.ones(2))], Registry.table["asked"]))
    torch.testing.assert_close(*results)


@pytest.mark.regression
def test_typing_aliases_in_the_forward():
    """crossvit: torch.jit.annotate(List[torch.Tensor], [])."""

    def fn(x):
        found = torch.jit.annotate(List[torch.Tensor], [])  # noqa: UP006
        found.append(x + 1)
        return typing.cast(torch.Tensor, found[0])

    same(fn, torch.randn(3), backend="eager")


READ_ONLY_CHANGES = [
    "del c['made_up']",
    "del c['table']",
    "del c[3]",
    "del c[1:]",
    "c[1:] = 5",
    "c[3] = 5",
    "c |= {}",
]


@pytest.mark.regression
@pytest.mark.parametrize("change", READ_ONLY_CHANGES)
def test_the_dict_of_a_class_is_read_only(change: str) -> None:
    """An item was deleted in the trace, and a slice was refused as a key."""
    text = f"def program(x):\n c = Table.__dict__\n try:\n  {change}\n except Exception as e:\n  return x, repr(e)"
    space: dict[str, Any] = {"Table": Table}
    exec(text, space)
    program, x = space["program"], torch.ones(2)
    assert dynamotor.compile(program, backend="eager", fullgraph=True)(x)[1] == program(x)[1]
