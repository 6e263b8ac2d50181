"""Index expressions: affine forms over loop variables, with floor-division and remainder, kept simplified.

Sizes, coefficients and constants are plain ints, or a `Size` where they differ between calls. Simplifications
are proved and ask nothing, so that an index is right for every value of the symbols.

>>> i, j = Var("i", 8), Var("j", 64)
>>> flat = 64 * Index.of(i) + Index.of(j)
>>> flat // 64, flat % 64
(i, j)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from ..graph.sizes import INFINITY, Dim, Size, divides, equal, hint, known, split
from ..graph.spec import contiguous_stride


@final
class Var:
    """A loop variable: takes 0 .. size - 1. Interned by name and size, so identity is equality."""

    __slots__ = ("name", "size", "hint", "bounds", "single", "index")
    name: str
    size: Dim
    hint: int  # the size at the call that is being compiled
    bounds: Bounds
    single: bool  # its only value is 0
    index: Index  # itself as a position
    _known: dict[tuple[str, int], Var] = {}
    _symbolic: dict[tuple[str, Size], Var] = {}  # of the graph that is being lowered

    def __new__(cls, name: str, size: Dim) -> Var:
        is_symbolic = type(size) is Size
        table: dict[Any, Var] = cls._symbolic if is_symbolic else cls._known
        found = table.get((name, size))
        if found is None:
            found = table[name, size] = object.__new__(cls)
            found.name, found.size, found.hint = name, size, hint(size)
            found.single = not is_symbolic and size <= 1  # its only value is 0
            found.bounds = (0, size - 1) if is_symbolic else (0, max(size - 1, 0))
            found.index = Index({found: 1})
        return found

    @classmethod
    def forget(cls) -> None:
        """Drop the variables of the last graph with symbols."""
        cls._symbolic.clear()

    def __repr__(self) -> str:
        return self.name


@final
@dataclass(frozen=True, slots=True)
class Div:
    """`base // n` where nothing simpler is known."""

    base: Index
    n: Dim

    @property
    def bounds(self) -> Bounds:
        lo, hi = self.base.bounds
        return lo // self.n, hi // self.n

    def __repr__(self) -> str:
        return f"({self.base} // {self.n})"


@final
@dataclass(frozen=True, slots=True)
class Mod:
    """`base % n` where nothing simpler is known."""

    base: Index
    n: Dim

    @property
    def bounds(self) -> Bounds:
        return 0, self.n - 1

    def __repr__(self) -> str:
        return f"({self.base} % {self.n})"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """An index that is itself a value of the program (gather): 0 .. size - 1, checked by the code that
    computes it.
    """

    expr: Any  # lower.ir.Expr
    size: Dim

    @property
    def bounds(self) -> Bounds:
        # For one place too: the check that it is the one must not be simplified away.
        return 0, self.size - 1 if type(self.size) is Size else max(self.size - 1, 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loaded) and self.expr is other.expr and equal(self.size, other.size)

    def __hash__(self) -> int:
        return hash((id(self.expr), self.size))

    def __repr__(self) -> str:
        return f"[{self.expr}]"


Atom = Var | Div | Mod | Loaded
Bounds = tuple[Dim, Dim]


@final
class Index:
    """const + sum of coefficient * atom. Immutable; equal forms compare equal."""

    __slots__ = ("terms", "const", "loaded", "_hash", "_bounds", "_vars")

    def __init__(self, terms: dict[Atom, Dim], const: Dim = 0) -> None:
        self.terms = {
            a: c
            for a, c in terms.items()
            if (type(c) is Size or c) and not (a.single if type(a) is Var else _is_zero(a.bounds))
        }
        self.const = const
        self._hash: int | None = None
        self._bounds: Bounds | None = None
        self._vars: frozenset[Var] | None = None
        self.loaded: tuple[Any, ...] | None = None  # `ir.loaded_exprs` of it, once asked

    @staticmethod
    def of(value: Index | Atom | Dim) -> Index:
        """An index from an atom or a number."""
        if type(value) is Index:
            return value
        if type(value) is Var:
            return value.index
        return Index({}, value) if isinstance(value, (int, Size)) else Index({value: 1})

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # The hashes first: numbers of unlike form are not compared, which would ask.
        return (
            isinstance(other, Index)
            and hash(self) == hash(other)
            and self.const == other.const
            and self.terms == other.terms
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((frozenset(self.terms.items()), self.const))
        return self._hash

    def __repr__(self) -> str:
        parts = [f"{a}" if is_one(c) else f"{c}*{a}" for a, c in self.terms.items()]
        shown = type(self.const) is Size or self.const or not parts
        return " + ".join(parts + ([f"{self.const}"] if shown else []))

    @property
    def bounds(self) -> Bounds:
        """Smallest and largest value, both included."""
        if self._bounds is None:
            lo = hi = self.const
            for atom, c in self.terms.items():
                a, b = atom.bounds
                if known(">=", c):
                    lo, hi = lo + c * a, hi + c * b
                elif known(">=", -c):
                    lo, hi = lo + c * b, hi + c * a
                else:  # a step that may go either way
                    lo, hi = -INFINITY, INFINITY
                    break
            self._bounds = lo, hi
        return self._bounds

    def meets(self, other: Index) -> bool:
        """Whether both may give one place, each at some iteration of its loops."""
        (a, b), (c, d) = self.bounds, other.bounds
        return not (known(">=", c - b - 1) or known(">=", a - d - 1))

    def within(self, n: Dim) -> bool:
        """Whether it provably is one of 0 .. n - 1."""
        lo, hi = self.bounds
        return known(">=", lo) and known(">=", n - hi - 1)

    def __add__(self, other: Index | Dim) -> Index:
        if not isinstance(other, Index):
            return Index(self.terms, self.const + other) if type(other) is Size or other else self
        terms = dict(self.terms)
        for atom, c in other.terms.items():
            terms[atom] = terms.get(atom, 0) + c
        return Index(terms, self.const + other.const)

    __radd__ = __add__

    def __sub__(self, other: Index | Dim) -> Index:
        return self + (-other)

    def __neg__(self) -> Index:
        return self * -1

    def __mul__(self, n: Dim) -> Index:
        return self if is_one(n) else Index({a: c * n for a, c in self.terms.items()}, self.const * n)

    __rmul__ = __mul__

    def _split(self, n: Dim) -> tuple[Index, Index]:
        """(q, r) with self == n * q + r, r holding what n does not divide, and no value of it negative: C and
        Triton round towards zero. Where that cannot be proved (`may_be_negative`), their text rounds down.
        """
        whole = {a: c // n for a, c in self.terms.items() if divides(n, c)}
        rest = {a: c for a, c in self.terms.items() if a not in whole}
        q, r = split(self.const, n)
        low = Index(rest, r)
        least = low.bounds[0]  # less than 0 by steps back: `flip(x)` is at `127 - i`
        if known(">=", least):
            return Index(whole, q), low
        if type(least) is int and type(n) is int:
            lift = -(least // n)
        elif known(">=", least + n):
            lift = 1
        else:
            whole_constant = Index(rest, self.const)
            if known(">=", whole_constant.bounds[0]):
                return Index(whole), whole_constant
            lift = 0
        return Index(whole, q - lift), Index(rest, r + lift * n)

    def _coarse(self, n: Dim) -> tuple[Dim, Index, Index] | None:
        """(g, high, low) with self == g * high + low, 0 <= low < g, g dividing n: the low digits cannot
        carry.
        """
        steps = {c if known(">=", c) else -c for c in self.terms.values()}
        for g in sorted(steps, key=hint, reverse=True):
            if known(">=", g - 2) and divides(g, n):
                high, low = self._split(g)
                if low.within(g):
                    return g, high, low
        return None

    def __floordiv__(self, n: Dim) -> Index:
        if is_one(n):
            return self
        whole, rest = self._split(n)
        if rest.within(n):
            return whole
        coarse = rest._coarse(n)
        if coarse:
            return whole + coarse[1] // (n // coarse[0])
        if len(rest.terms) == 1 and is_zero(rest.const):
            ((atom, c),) = rest.terms.items()
            if is_one(c) and isinstance(atom, Div):
                return whole + Index.of(Div(atom.base, atom.n * n))
        return whole + Index.of(Div(rest, n))

    def __mod__(self, n: Dim) -> Index:
        if (
            is_one(n) or type(n) is int and n == 0
        ):  # along a dimension without elements no loop asks where it is
            return Index({}, 0)
        _, rest = self._split(n)
        if rest.within(n):
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
                if type(atom) is Var:
                    found.add(atom)
                elif type(atom) is Loaded:
                    found |= atom.expr.vars
                else:
                    found |= atom.base.vars()
            self._vars = frozenset(found)
        return self._vars

    @property
    def is_affine(self) -> bool:
        """Only loop variables, no division, remainder or loaded index."""
        return self.terms.keys() == self.vars()

    def coefficient(self, var: Var) -> Dim | None:
        """Step per unit of `var`, or None when it is not linear in it."""
        for atom in self.terms:
            if type(atom) is not Var:
                inside = atom.expr.vars if type(atom) is Loaded else atom.base.vars()
                if var in inside:
                    return None
        return self.terms.get(var, 0)

    def subst(self, env: Mapping[Var, Index]) -> Index:
        """Replace variables. Loaded indices are rewritten through `Expr.subst`."""
        return flatten([_put_in(atom, env) for atom in self.terms], self.terms.values(), self.const)


ZERO = Index({}, 0)


def may_be_negative(atom: Div | Mod) -> bool:
    """Whether a division's text must round down itself: its dividend is not proved to be 0 or more."""
    return not known(">=", atom.base.bounds[0])


def is_one(n: Dim | None) -> bool:
    """Whether a number is 1 and no expression that may be."""
    return type(n) is int and n == 1


def is_zero(n: Dim | None) -> bool:
    """Whether a number is 0 and no expression that may be."""
    return type(n) is int and n == 0


def _put_in(atom: Atom, env: Mapping[Var, Index]) -> Index | Atom:
    """An atom with variables replaced."""
    if type(atom) is Var:
        return env.get(atom, atom)
    if type(atom) is Loaded:
        return Loaded(atom.expr.subst(env), atom.size)
    base = atom.base.subst(env)
    return base // atom.n if isinstance(atom, Div) else base % atom.n


def _is_zero(bounds: Bounds) -> bool:
    return is_zero(bounds[0]) and is_zero(bounds[1])


def flatten(index: Sequence[Index | Atom], stride: Iterable[Dim], offset: Dim = 0) -> Index:
    """offset + sum of index * stride."""
    terms: dict[Atom, Dim] = {}
    for i, s in zip(index, stride, strict=True):
        if type(i) is not Index:
            terms[i] = terms.get(i, 0) + s
        elif type(s) is Size or s:
            offset += i.const * s
            for atom, c in i.terms.items():
                terms[atom] = terms.get(atom, 0) + c * s
    found = Index(terms, offset)
    for atom in found.terms:
        if type(atom) is Mod:
            joined = _rejoined(found, atom)
            if joined is not None:
                return flatten([joined], [1])
    return found


def _rejoined(index: Index, low: Mod) -> Index | None:
    """n * (b // n) + b % n is b: one view took it apart, another one put it together. None: it is not so."""
    c, high = index.terms[low], low.base // low.n
    if len(high.terms) != 1 or not is_zero(high.const):
        return None
    ((atom, unit),) = high.terms.items()
    if not is_one(unit) or atom not in index.terms or not equal(index.terms[atom], c * low.n):
        return None
    rest = {a: k for a, k in index.terms.items() if a not in (low, atom)}
    return Index(rest, index.const) + low.base * c


def row_major(variables: Sequence[Var]) -> Index:
    """The flat position in a nest of loops."""
    return flatten([Index.of(v) for v in variables], contiguous_stride([v.size for v in variables]))


def determined(index: Index) -> frozenset[Var]:
    """Variables that a flat position tells: two positions that are equal have the same value of each of
    these.

    Where the terms are digits of a mixed-radix number, each digit that is a variable is one of them.
    """
    end: Dim = 1
    for atom, c in sorted(index.terms.items(), key=lambda term: hint(term[1])):
        low, high = atom.bounds
        if not known(">=", c - end) or not known(">=", low):
            return frozenset()
        end = c * (high + 1)
    return frozenset(atom for atom in index.terms if isinstance(atom, Var))


def unflatten(flat: Index, shape: Sequence[Dim]) -> tuple[Index, ...]:
    """Row-major coordinates of a flat index in a shape."""
    coords = []
    for size, step in zip(shape, contiguous_stride(shape), strict=True):
        coords.append(ZERO if is_one(size) else (flat // step) % size)
    return tuple(coords)


def reindex(index: Sequence[Index], shape: Sequence[Dim], new_shape: Sequence[Dim]) -> tuple[Index, ...]:
    """Coordinates in `new_shape` of the element at `index` of `shape` (same number of elements, row-major).

    Dimensions that agree from the left pass through untouched, so loaded indices survive there.
    """
    lead = 0
    while lead < min(len(shape), len(new_shape)) and equal(shape[lead], new_shape[lead]):
        lead += 1
    rest = flatten(index[lead:], contiguous_stride(shape[lead:]))
    return (*index[:lead], *unflatten(rest, new_shape[lead:]))
