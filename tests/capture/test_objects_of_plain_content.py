"""Subclasses of int, str and the like have their content, wherever they come from; a defaultdict takes its
items by name; `str.format` asks objects for their own text.
"""

from __future__ import annotations

import collections
import copy  # noqa: F401  (the expressions do)
import types  # noqa: F401
from typing import Any

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


class Whole(int):
    def __mul__(self, other: Any) -> Any:
        return Whole(int(self) * other + 1)


class Part(float):
    pass


class Text(str):
    pass


class Formatted:
    def __format__(self, spec: str) -> str:
        return f"formatted{spec}"

    def __repr__(self) -> str:
        return "shown"


WHOLE, PART, TEXT = Whole(3), Part(2.5), Text("ab")


def numbers(x: torch.Tensor, i: Whole, f: Part) -> Any:
    return int(i), float(i), -i, abs(i), ~i, i == 3, i.__index__(), i * 2, int(f), complex(f), x + i


def texts(x: torch.Tensor, s: Text) -> Any:
    return s[0], len(s), s == "ab", {s: 1}["ab"], s + "c", x + len(s)


def outside(x: torch.Tensor) -> Any:
    return numbers(x, WHOLE, PART), texts(x, TEXT)


def inside(x: torch.Tensor) -> Any:
    return numbers(x, Whole(3), Part(2.5)), texts(x, Text("ab"))


def formatted(x: torch.Tensor) -> Any:
    v = Formatted()
    return *(text.format(v) for text in ("{}", "{!r}", "{:>9}")), f"{v:3}", x + 1


def with_default(x: torch.Tensor) -> Any:
    return collections.defaultdict(list, {"b": 1}, a=[2]), x + 1


@pytest.mark.parametrize("function", [outside, inside, formatted, with_default])
def test_is_as_in_eager(function: Any) -> None:
    compiled = dynamotor.compile(function, backend="eager")
    for _ in range(2):
        assert str(compiled(torch.ones(2))) == str(function(torch.ones(2)))


def test_another_content_is_seen() -> None:
    compiled = dynamotor.compile(numbers, backend="eager")
    for i, f in ((Whole(3), Part(2.5)), (Whole(4), Part(2.5)), (Whole(4), Part(-1.0))):
        assert str(compiled(torch.ones(2), i, f)) == str(numbers(torch.ones(2), i, f))


class Index:
    def __index__(self) -> int:
        return 1


EXPRESSIONS = """
    float(Index()); WHOLE - 0.5; 0.5 * WHOLE; {1: 2}.keys() == 1; (1, 2) < {1: 2}.items(); {1} > {1: 2}.values()
    {1: 2}.keys() <= {1, 2}; {} in TEXT; TEXT in "xaby"; collections.defaultdict(int, a=1) | {}; type(OD | {"b": 2})
    Pair((1, 2)) == torch.Size([1, 2]); Pair((1, 2)) != torch.Size([1, 2]); reversed(5); {slice(0, 2): 1}
    torch.zeros(range(1, 3)); torch.zeros(collections.deque([1, 2])); torch.tensor(range(3))
    getattr(x, x.sum()); x.requires_grad_(x.sum() > 0); (3).__abs__(x); (1, 2).__add__(x); [1].__mul__("a"); Pair((1, 2)).__getattribute__("__len__")(); (3).__add__("a")
    Group([1]) == Group([1]); Group([1]) | {2}; {1, 2} > Group(); Group() in {frozenset()}; {1} - Group([1])
    copy.copy(Group([1])) == {1}; copy.copy(Group([1])) == Group([1]); copy.copy(TEXT) == TEXT; copy.deepcopy(WHOLE) + 1
    copy.deepcopy(DEFAULTS).default_factory; DEFAULTS.copy().default_factory; copy.copy(bytearray(b"a"))
    type(dict.copy(DEFAULTS)); type(dict.copy(OD)); type(OD.copy()); type(DEFAULTS.copy())
    (1,) + Pair((1, 2)); collections.Counter("a") | {"b": 1}; collections.defaultdict(3); types.SimpleNamespace(3)
"""
OD: Any = collections.OrderedDict(a=1)
DEFAULTS: Any = collections.defaultdict(list, a=[1])


class Pair(tuple):
    pass


class Group(set):
    pass


@pytest.mark.parametrize("text", [e.strip() for e in EXPRESSIONS.replace("\n", ";").split(";") if e.strip()])
def test_an_expression_is_as_in_eager(text: str) -> None:
    space = dict(globals())
    exec(f"def function(x):\n    return {text}, x + 1", space)

    def outcome(function: Any) -> tuple[str, str]:
        try:
            return "returned", str(function(torch.ones(2)))
        except Exception as error:
            return type(error).__name__, str(error)

    assert outcome(dynamotor.compile(space["function"], backend="eager")) == outcome(space["function"])


LOG: list[str] = []


class Values(dict):
    def __getitem__(self, key: Any) -> Any:
        LOG.append("item")
        return super().__getitem__(key) * 2

    def keys(self) -> Any:
        LOG.append("keys")
        return super().keys()

    def __len__(self) -> int:
        LOG.append("len")
        return super().__len__()


class Walked(Values):
    def __iter__(self) -> Any:
        LOG.append("iter")
        return super().__iter__()


class Numbers:
    def __iter__(self) -> Any:
        return iter((1, 2))

    def __len__(self) -> int:
        LOG.append("len")
        raise self.error  # type: ignore[attr-defined]


class Unknown(Numbers):
    error = NotImplementedError("no length")


class Vague(Numbers):
    error = TypeError("no length")


ASKED = """
    dict(d); {**d}; (lambda **kwargs: kwargs)(**d); {} | d; collections.OrderedDict(d); collections.Counter(d); list(d)
    len(d); "a" in d; d.items(); d.popitem(); d.clear(); type(d)(d); d.get("a"); d == {"a": 1}; d.update(d); [*d]
"""
LISTED = "list(d); tuple(d); [*d]; (0, *d); sorted(d); set(d); [one for one in d]; max(*d)"


@pytest.mark.parametrize("kind", [Values, Walked, Unknown, Vague])
def test_objects_are_asked_what_eager_asks(kind: type) -> None:
    """Python reads the memory of some dicts, whatever their class says; lists ask for lengths; guards never ask."""
    contents = ({"a": 1, "b": 2},) if issubclass(kind, dict) else ()
    for text in (ASKED if contents else LISTED).replace("\n", ";").split(";"):
        if text.strip():
            seen = []
            function = eval(f"lambda x, d: (x * 2, {text})", globals())
            for called in (function, dynamotor.compile(function, backend="eager")):
                d: Any = kind(*contents)
                for _ in range(2):
                    LOG.clear()
                    try:
                        seen.append(str(called(torch.ones(1), d)[1]))
                    except Exception as error:
                        seen.append(repr(error))
                    seen.extend(LOG)
            assert seen[: len(seen) // 2] == seen[len(seen) // 2 :], text


class Row(list):
    pass


def _unions_in_place(x: torch.Tensor) -> Any:
    table: Any = collections.defaultdict(int)
    same = table
    table |= {"q": 1}
    table["new"] += 1
    table |= [("pairs", 2)]
    return type(table).__name__, table is same, dict(table)


def _a_list_that_is_added_to_itself(x: torch.Tensor) -> Any:
    row = same = Row([1])
    row += row
    row.extend(row)
    row *= 2
    return type(row).__name__, row is same, list(row)


@pytest.mark.parametrize("function", [_unions_in_place, _a_list_that_is_added_to_itself])
def test_what_is_changed_in_place_stays_itself(function: Any) -> None:
    assert dynamotor.compile(function, backend="eager")(torch.ones(2)) == function(torch.ones(2))
