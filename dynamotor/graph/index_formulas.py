"""Integer formulas of indices and proofs about them: the language in which a mask is understood.

A number is an `Affine` sum of atoms, a condition is built of comparisons of such sums with zero. Each is
simplified where it is made, by intervals, so that equal formulas are mostly equal objects.

>>> q, k = Position("q", 8), Position("k", 8)
>>> at_least(affine(q) - affine(k))
q - k >= 0
>>> at_least(affine(q) - affine(k) + 100)  # true of all indices
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .sizes import Dim, Size, known


class NoFormula(Exception):
    """No formula of this language expresses the graph's value there."""


@dataclass(frozen=True)
class Position:
    """A position in a dimension: 0 <= index < size."""

    name: str
    size: Dim = field(compare=False)  # a comparison of sizes would ask for guards
    extent: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "extent", repr(self.size))

    def ends(self) -> tuple[Dim | None, Dim | None]:
        return 0, self.size - 1

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Amount:
    """A size that differs between calls."""

    text: str
    size: Size = field(compare=False)

    def ends(self) -> tuple[Dim | None, Dim | None]:
        return self.size, self.size

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Read:
    """An element of a tensor whose values only data decide: integers, or 0 and 1 for conditions."""

    node: Any
    at: tuple[Affine, ...]
    is_condition: bool = False

    def ends(self) -> tuple[Dim | None, Dim | None]:
        return (0, 1) if self.is_condition else (None, None)

    def __repr__(self) -> str:
        return f"{self.node}[{', '.join(map(repr, self.at))}]"


@dataclass(frozen=True)
class Quotient:
    """`of // by`, rounded down; by > 0."""

    of: Affine
    by: int

    def ends(self) -> tuple[Dim | None, Dim | None]:
        low, high = self.of.ends()
        return low // self.by if type(low) is int else None, high // self.by if type(high) is int else None

    def __repr__(self) -> str:
        return f"({self.of})//{self.by}"


@dataclass(frozen=True)
class Magnitude:
    """`abs(of)`."""

    of: Affine

    def ends(self) -> tuple[Dim | None, Dim | None]:
        return 0, None

    def __repr__(self) -> str:
        return f"abs({self.of})"


@dataclass(frozen=True)
class Affine:
    """A constant and integer multiples of atoms."""

    terms: frozenset[tuple[Any, int]]
    constant: int

    def ends(self) -> tuple[Dim | None, Dim | None]:
        """The least and the greatest value, each None where nothing bounds it."""
        low: Any = self.constant
        high: Any = self.constant
        for atom, c in self.terms:
            least, most = atom.ends() if c > 0 else reversed(atom.ends())
            low = None if low is None or least is None else low + c * least
            high = None if high is None or most is None else high + c * most
        return low, high

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.terms, self.constant + other)
        total = dict(self.terms)
        for atom, c in other.terms:
            total[atom] = total.get(atom, 0) + c
        return _affine(total, self.constant + other.constant)

    def __neg__(self) -> Affine:
        return self.times(-1)

    def __sub__(self, other: Affine | int) -> Affine:
        return self + -other

    def times(self, n: int) -> Affine:
        """The n-fold."""
        return _affine({atom: c * n for atom, c in self.terms}, self.constant * n)

    def divided(self, n: int) -> tuple[Affine, Affine]:
        """(self // n, self % n), n > 0."""
        whole = _affine({atom: c // n for atom, c in self.terms if c % n == 0}, self.constant // n)
        rest = _affine({atom: c for atom, c in self.terms if c % n}, self.constant % n)
        low, high = rest.ends()
        if low is None or high is None or not (known(">=", low) and known(">=", n - 1 - high)):
            quotient = Affine(frozenset({(Quotient(rest, n), 1)}), 0)
            return whole + quotient, rest - quotient.times(n)
        return whole, rest

    def __repr__(self) -> str:
        parts = [
            f"{'-' if c < 0 else '+'} {'' if abs(c) == 1 else f'{abs(c)}*'}{atom}"
            for atom, c in sorted(self.terms, key=lambda t: (t[1] < 0, repr(t[0])))
        ]
        if self.constant or not parts:
            parts.append(f"{'-' if self.constant < 0 else '+'} {abs(self.constant)}")
        return " ".join(parts).removeprefix("+ ")


def _affine(terms: Mapping[Any, int], constant: int) -> Affine:
    return Affine(frozenset((atom, c) for atom, c in terms.items() if c), constant)


def affine(value: Any) -> Affine:
    """A number, a size or an atom as a sum."""
    if type(value) is Affine:
        return value
    if type(value) is Size:
        total = Affine(frozenset(), value.terms.get((), 0))
        for monomial, c in value.terms.items():
            if monomial:
                one = Size({monomial: 1}, value.env)
                total = total + Affine(frozenset({(Amount(repr(one), one), c)}), 0)
        return total
    return Affine(frozenset(), int(value)) if isinstance(value, int) else Affine(frozenset({(value, 1)}), 0)


# Conditions -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fact:
    """`of >= 0` or `of == 0`."""

    kind: str
    of: Affine

    def __repr__(self) -> str:
        return f"{self.of} {self.kind} 0"


@dataclass(frozen=True)
class All:
    """All of the parts hold."""

    parts: frozenset[Any]

    def __repr__(self) -> str:
        return " & ".join(sorted(f"({part})" for part in self.parts))


@dataclass(frozen=True)
class Some:
    """One of the parts holds, or more."""

    parts: frozenset[Any]

    def __repr__(self) -> str:
        return " | ".join(sorted(f"({part})" for part in self.parts))


Condition = bool | Fact | All | Some
CONDITIONS = (bool, Fact, All, Some)


def at_least(of: Affine) -> Condition:
    """`of >= 0`."""
    low, high = of.ends()
    if low is not None and known(">=", low):
        return True
    if high is not None and known(">=", -high - 1):
        return False
    split = [(atom, c) for atom, c in of.terms if type(atom) is Magnitude and abs(c) == 1]
    if len(split) == 1:
        ((atom, c),) = split
        rest = of - Affine(frozenset(split), 0)
        return (both if c < 0 else either)(
            at_least(rest + atom.of.times(c)), at_least(rest - atom.of.times(c))
        )
    step = math.gcd(*[c for _, c in of.terms])
    if step > 1:
        of = Affine(frozenset((atom, c // step) for atom, c in of.terms), of.constant // step)
    return Fact(">=", of)


def is_zero(of: Affine) -> Condition:
    """`of == 0`."""
    low, high = of.ends()
    if low is not None and known(">=", low - 1) or high is not None and known(">=", -high - 1):
        return False
    if not of.terms:
        return of.constant == 0
    step = math.gcd(*[c for _, c in of.terms])
    if of.constant % step:
        return False
    if sorted((repr(atom), c) for atom, c in of.terms)[0][1] < 0:
        step = -step
    return Fact("==", Affine(frozenset((atom, c // step) for atom, c in of.terms), of.constant // step))


def both(*parts: Condition) -> Condition:
    """All of these."""
    return _joined(All, False, parts)


def either(*parts: Condition) -> Condition:
    """At least one of these."""
    return _joined(Some, True, parts)


def _joined(kind: type, decides: bool, parts: Iterable[Condition]) -> Condition:
    found: set[Any] = set()
    for part in parts:
        if part is decides:
            return decides
        if isinstance(part, All | Some) and type(part) is kind:
            found |= part.parts
        elif not isinstance(part, bool):
            found.add(part)
    weak = kind is All  # of two bounds of one sum the tighter one decides a conjunction
    for part in list(found):
        if type(part) is Fact and part.kind == ">=":
            same = [p for p in found if type(p) is Fact and p.kind == ">=" and p.of.terms == part.of.terms]
            found -= {p for p in same if p.of.constant != (min if weak else max)(s.of.constant for s in same)}
    if any(negated(part) in found for part in found):
        return decides
    return not decides if not found else next(iter(found)) if len(found) == 1 else kind(frozenset(found))


def negated(condition: Condition) -> Condition:
    """Its contrary."""
    if isinstance(condition, bool):
        return not condition
    if type(condition) is Fact:
        less = at_least(-condition.of - 1)
        return less if condition.kind == ">=" else either(less, at_least(condition.of - 1))
    assert isinstance(condition, (All, Some))
    return (either if type(condition) is All else both)(*map(negated, condition.parts))


def replaced(value: Any, new: Mapping[Position, Affine]) -> Any:
    """A sum or condition with other sums for indices."""
    if type(value) is Affine:
        total = Affine(frozenset(), value.constant)
        for atom, c in value.terms:
            total = total + _replaced_atom(atom, new).times(c)
        return total
    if type(value) is Fact:
        return (at_least if value.kind == ">=" else is_zero)(replaced(value.of, new))
    if isinstance(value, (All, Some)):
        return (both if type(value) is All else either)(*[replaced(part, new) for part in value.parts])
    return value


def _replaced_atom(atom: Any, new: Mapping[Position, Affine]) -> Affine:
    kind = type(atom)
    if kind is Position:
        return new.get(atom, affine(atom))
    if kind is Read:
        return affine(Read(atom.node, tuple([replaced(i, new) for i in atom.at]), atom.is_condition))
    if kind is Quotient:
        return replaced(atom.of, new).divided(atom.by)[0]
    return affine(Magnitude(replaced(atom.of, new))) if kind is Magnitude else affine(atom)


def atoms(value: Any) -> set[Any]:
    """All atoms of a sum or condition, those inside of others too."""
    found: set[Any] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, (All, Some)):
            todo += item.parts
        elif isinstance(item, (Fact, Quotient, Magnitude)):
            todo.append(item.of)
        elif type(item) is Read:
            todo += item.at
        elif type(item) is Affine:
            found |= {atom for atom, _ in item.terms}
            todo += [atom for atom, _ in item.terms]
    return found


def computed(value: Any, atom: Callable[[Any], Any]) -> Any:
    """A sum or condition computed with whatever `atom` gives for an atom: numbers or tensors."""
    if type(value) is Affine:
        total: Any = value.constant
        for part, c in sorted(value.terms, key=repr):
            total = total + _atom_computed(part, atom) * c
        return total
    if type(value) is Fact:
        number = computed(value.of, atom)
        return number >= 0 if value.kind == ">=" else number == 0
    if isinstance(value, (All, Some)):
        parts = [computed(part, atom) for part in sorted(value.parts, key=repr)]
        found = parts[0]
        for part in parts[1:]:
            found = found & part if type(value) is All else found | part
        return found
    return value


def _atom_computed(part: Any, atom: Callable[[Any], Any]) -> Any:
    if type(part) is Quotient:
        return computed(part.of, atom) // part.by
    return abs(computed(part.of, atom)) if type(part) is Magnitude else atom(part)
