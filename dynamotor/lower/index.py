"""Index expressions: plain-int affine forms over loop variables, with floor-division and remainder, kept simplified.

>>> i, j = Var("i", 8), Var("j", 64)
>>> flat = 64 * Index.of(i) + Index.of(j)
>>> flat // 64, flat % 64
(i, j)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..graph.spec import contiguous_stride


class Var:
    """A loop variable: takes 0 .. size - 1. Interned by name and size, so identity is equality."""

    __slots__ = ("name", "size", "bounds")
    _known: dict[tuple[str, int], Var] = {}

    def __new__(cls, name: str, size: int) -> Var:
        found = cls._known.get((name, size))
        if found is None:
            found = cls._known[name, size] = object.__new__(cls)
            found.name, found.size, found.bounds = name, size, (0, max(size - 1, 0))
        return found

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Div:
    """`base // n` where nothing simpler is known."""

    base: Index
    n: int

    @property
    def bounds(self) -> tuple[int, int]:
        lo, hi = self.base.bounds
        return lo // self.n, hi // self.n

    def __repr__(self) -> str:
        return f"({self.base} // {self.n})"


@dataclass(frozen=True, slots=True)
class Mod:
    """`base % n` where nothing simpler is known."""

    base: Index
    n: int

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, self.n - 1

    def __repr__(self) -> str:
        return f"({self.base} % {self.n})"


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An index that is itself a value of the program (gather): 0 .. size - 1, checked by the code that computes it."""

    expr: Any  # lower.ir.Expr
    size: int

    @property
    def bounds(self) -> tuple[int, int]:
        return 0, max(self.size - 1, 1)  # for one place too: the check that it is the one must not be simplified away

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loaded) and self.expr is other.expr and self.size == other.size

    def __hash__(self) -> int:
        return hash((id(self.expr), self.size))

    def __repr__(self) -> str:
        return f"[{self.expr}]"


Atom = Var | Div | Mod | Loaded


class Index:
    """const + sum of coefficient * atom. Immutable; equal forms compare equal."""

    __slots__ = ("terms", "const", "_hash", "_bounds", "_vars")

    def __init__(self, terms: dict[Atom, int], const: int = 0) -> None:
        self.terms = {a: c for a, c in terms.items() if c and a.bounds != (0, 0)}
        self.const = const
        self._hash: int | None = None
        self._bounds: tuple[int, int] | None = None
        self._vars: frozenset[Var] | None = None

    @staticmethod
    def of(value: Index | Atom | int) -> Index:
        """An index from an atom or a number."""
        if isinstance(value, Index):
            return value
        return Index({}, value) if isinstance(value, int) else Index({value: 1})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.const == other.const and self.terms == other.terms

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((frozenset(self.terms.items()), self.const))
        return self._hash

    def __repr__(self) -> str:
        parts = [f"{a}" if c == 1 else f"{c}*{a}" for a, c in self.terms.items()]
        return " + ".join(parts + ([str(self.const)] if self.const or not parts else []))

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest value, both included."""
        if self._bounds is None:
            lo = hi = self.const
            for atom, c in self.terms.items():
                a, b = atom.bounds
                lo, hi = (lo + c * a, hi + c * b) if c > 0 else (lo + c * b, hi + c * a)
            self._bounds = lo, hi
        return self._bounds

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.const + other) if other else self
        terms = dict(self.terms)
        for atom, c in other.terms.items():
            terms[atom] = terms.get(atom, 0) + c
        return Index(terms, self.const + other.const)

    __radd__ = __add__

    def __sub__(self, other: Index | int) -> Index:
        return self + (-other)

    def __neg__(self) -> Index:
        return self * -1

    def __mul__(self, n: int) -> Index:
        return self if n == 1 else Index({a: c * n for a, c in self.terms.items()}, self.const * n)

    __rmul__ = __mul__

    def _split(self, n: int) -> tuple[Index, Index]:
        """(q, r) with self == n * q + r, r holding what n does not divide."""
        whole = {a: c // n for a, c in self.terms.items() if c % n == 0}
        rest = {a: c for a, c in self.terms.items() if c % n}
        return Index(whole, self.const // n), Index(rest, self.const % n)

    def _coarse(self, n: int) -> tuple[int, Index, Index] | None:
        """(g, high, low) with self == g * high + low, 0 <= low < g, g dividing n: the low digits cannot carry."""
        for g in sorted({abs(c) for c in self.terms.values()}, reverse=True):
            if g > 1 and n % g == 0:
                high, low = self._split(g)
                lo, hi = low.bounds
                if lo >= 0 and hi < g:
                    return g, high, low
        return None

    def __floordiv__(self, n: int) -> Index:
        if n == 1:
            return self
        whole, rest = self._split(n)
        lo, hi = rest.bounds
        if lo >= 0 and hi < n:
            return whole
        coarse = rest._coarse(n)
        if coarse:
            return whole + coarse[1] // (n // coarse[0])
        if len(rest.terms) == 1 and not rest.const:
            ((atom, c),) = rest.terms.items()
            if c == 1 and isinstance(atom, Div):
                return whole + Index.of(Div(atom.base, atom.n * n))
        return whole + Index.of(Div(rest, n))

    def __mod__(self, n: int) -> Index:
        if n == 1:
            return Index({}, 0)
        _, rest = self._split(n)
        lo, hi = rest.bounds
        if lo >= 0 and hi < n:
            return rest
        coarse = rest._coarse(n)
        if coarse:
            g, high, low = coarse
            return low + (high % (n // g)) * g
        return Index.of(Mod(rest, n))

    def vars(self) -> frozenset[Var]:
        """The loop variables it depends on, inside atoms too."""
        if self._vars is None:
            found: set[Var] = set()
            for atom in self.terms:
                if isinstance(atom, Var):
                    found.add(atom)
                elif isinstance(atom, Loaded):
                    found |= atom.expr.vars
                else:
                    found |= atom.base.vars()
            self._vars = frozenset(found)
        return self._vars

    @property
    def is_affine(self) -> bool:
        """Only loop variables, no division, remainder or loaded index."""
        return all(isinstance(a, Var) for a in self.terms)

    def coefficient(self, var: Var) -> int | None:
        """Step per unit of `var`, or None when it is not linear in it."""
        for atom in self.terms:
            if not isinstance(atom, Var):
                inside = atom.expr.vars if isinstance(atom, Loaded) else atom.base.vars()
                if var in inside:
                    return None
        return self.terms.get(var, 0)

    def subst(self, env: Mapping[Var, Index]) -> Index:
        """Replace variables. Loaded indices are rewritten through `Expr.subst`."""
        total = Index({}, self.const)
        for atom, c in self.terms.items():
            if isinstance(atom, Var):
                new = env.get(atom)
                total = total + (Index.of(atom) if new is None else new) * c
            elif isinstance(atom, Loaded):
                total = total + Index.of(Loaded(atom.expr.subst(env), atom.size)) * c
            elif isinstance(atom, Div):
                total = total + (atom.base.subst(env) // atom.n) * c
            else:
                total = total + (atom.base.subst(env) % atom.n) * c
        return total


ZERO = Index({}, 0)


def flatten(index: Sequence[Index], stride: Iterable[int], offset: int = 0) -> Index:
    """offset + sum of index * stride."""
    terms: dict[Atom, int] = {}
    for i, s in zip(index, stride, strict=True):
        if s:
            offset += i.const * s
            for atom, c in i.terms.items():
                terms[atom] = terms.get(atom, 0) + c * s
    return Index(terms, offset)


def determined(index: Index) -> frozenset[Var]:
    """Variables that a flat position tells: two positions that are equal have the same value of each of these.

    Where the terms are digits of a mixed-radix number, each digit that is a variable is one of them.
    """
    end = 1
    for atom, c in sorted(index.terms.items(), key=lambda term: term[1]):
        low, high = atom.bounds
        if c < end or low < 0:
            return frozenset()
        end = c * (high + 1)
    return frozenset(atom for atom in index.terms if isinstance(atom, Var))


def unflatten(flat: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """Row-major coordinates of a flat index in a shape."""
    coords = []
    for size, step in zip(shape, contiguous_stride(shape), strict=True):
        coords.append(ZERO if size == 1 else (flat // step) % size)
    return tuple(coords)


def reindex(index: Sequence[Index], shape: Sequence[int], new_shape: Sequence[int]) -> tuple[Index, ...]:
    """Coordinates in `new_shape` of the element at `index` of `shape` (same number of elements, row-major).

    Dimensions that agree from the left pass through untouched, so loaded indices survive there.
    """
    lead = 0
    while lead < min(len(shape), len(new_shape)) and shape[lead] == new_shape[lead]:
        lead += 1
    rest = flatten(index[lead:], contiguous_stride(shape[lead:]))
    return (*index[:lead], *unflatten(rest, new_shape[lead:]))


def fresh_vars(prefix: str, shape: Sequence[int]) -> tuple[Var, ...]:
    """One variable a dimension."""
    return tuple(Var(f"{prefix}{d}", size) for d, size in enumerate(shape))
