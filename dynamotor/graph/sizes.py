"""Sizes that differ between calls: integer expressions over symbols, and the assumptions of a program.

A `Size` stands for an int. A question with one answer for all values of the symbols is answered; else the
answer at the call being compiled (the *hint*) is taken and becomes a guard. Becoming a plain int (`range(n)`)
is such a question: what knows nothing of symbols stays right, with its sizes specialised by a guard.

>>> env = ShapeEnv()
>>> n = env.symbol(64)
>>> (n * 6 + 3) // 3, n * 4 % 2, n > 1  # answered for every n that may come
(2*s0 + 1, 0, True)
>>> n > 10, env.guards
(True, [s0 >= 11])
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from ..base.errors import DynamotorError, InternalError

_UNBACKED_HINT = 4097  # costs are guessed for as many; no shape is of this size by chance
Monomial = tuple["Atom", ...]  # factors, sorted by `order`; () is the constant's
INFINITY = 1 << 62
LARGEST = 1 << 61  # integers beyond are constants: the guards and kernels compute in 64 bits


class DataDependent(DynamotorError):
    """DM210: the result's shape or value, or an answer about it, depends on data that a trace does not
    have.
    """


@final
class Symbol:
    """A size that is known at the call, or, `unbacked`, when a node of the graph has run: lo <= value <= hi.
    Compared by identity.
    """

    __slots__ = ("name", "hint", "lo", "hi", "env", "order", "unbacked")

    def __init__(self, env: ShapeEnv, name: str, hint: int, lo: int, hi: int, unbacked: bool = False) -> None:
        self.env, self.name, self.hint, self.lo, self.hi = env, name, hint, lo, hi
        self.unbacked = unbacked
        self.order = (0, len(env.symbols), "")

    def value(self, of: Mapping[Symbol, int]) -> int:
        """The value, given the symbols'."""
        return of[self]

    def __repr__(self) -> str:
        return self.name


@final
class Derived:
    """`a // b`, `a % b`, `min(a, b)` or `max(a, b)` where nothing simpler is known. Interned by
    `ShapeEnv.derived`.
    """

    __slots__ = ("kind", "a", "b", "env", "hint", "lo", "hi", "order")

    def __init__(self, env: ShapeEnv, kind: str, a: Size, b: Size, bounds: tuple[int, int]) -> None:
        self.env, self.kind, self.a, self.b = env, kind, a, b
        self.hint = _COMPUTE[kind](a.hint, b.hint)
        self.lo, self.hi = bounds
        self.order = (1, 0, repr(self))

    def value(self, of: Mapping[Symbol, int]) -> int:
        """The value, given the symbols'."""
        return _COMPUTE[self.kind](self.a.value(of), self.b.value(of))

    def __repr__(self) -> str:
        return f"{self.kind}({self.a}, {self.b})"


Atom = Symbol | Derived
_COMPUTE: dict[str, Callable[[int, int], int]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "min": min,
    "max": max,
}


# Functions in the texts of expressions beside `min` and `max`.
FUNCTIONS = {"floordiv": _COMPUTE["floordiv"], "mod": _COMPUTE["mod"]}


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """An assumption: `expr >= 0`, `expr == 0` or `expr != 0`; `where` is what asked."""

    kind: Literal[">=", "==", "!="]
    expr: Size
    where: Any = None

    def holds(self, of: Mapping[Symbol, int]) -> bool:
        """Whether it is true of these values; a quotient by zero makes it false, as in csrc/sizes.c."""
        try:
            value = self.expr.value(of)
        except ZeroDivisionError:
            return False
        return value >= 0 if self.kind == ">=" else (value == 0) is (self.kind == "==")

    def __repr__(self) -> str:
        left = {m: c for m, c in self.expr.terms.items() if m}
        right = -self.expr.terms.get((), 0)
        kind: str = self.kind
        if left and all(c < 0 for c in left.values()):  # -s0 + 8 >= 0 reads better as s0 <= 8
            left, right = {m: -c for m, c in left.items()}, -right
            kind = "<=" if kind == ">=" else kind
        return f"{_text(left)} {kind} {right}"


def _greatest(expr: Size) -> int:
    """A bound of the numbers that its calculation meets at the call that is being compiled."""
    parts = [part for m in expr.terms for atom in m if type(atom) is not Symbol for part in (atom.a, atom.b)]
    terms = (abs(c * math.prod(atom.hint for atom in m)) for m, c in expr.terms.items())
    return max(sum(terms), *map(_greatest, parts), 0)


class ShapeEnv:
    """The symbols of one program and its assumptions. `where()` names the line that is being
    traced. `undecided(question)` makes the error of a question about data that nothing proves.
    """

    def __init__(self, where: Callable[[], Any] = lambda: None) -> None:
        self.symbols: list[Symbol] = []
        self.fixed: dict[Symbol, Size | int] = {}  # symbols that were found to be a number, or another symbol
        self.where = where
        self.undecided: Callable[[str], Exception] = _undecided
        self.settled = False  # whether the entry is guarded already: later assumptions would go unchecked
        self.told: list[str] = []  # what holds without a guard
        self._guards: dict[Any, Guard] = {}
        self._derived: dict[Any, Derived] = {}
        self._answers: dict[Any, bool] = {}

    @property
    def guards(self) -> list[Guard]:
        """The assumptions, in the order of the questions."""
        return list(self._guards.values())

    def symbol(self, hint: int, lo: int = 2, hi: int = INFINITY, name: str = "") -> Size:
        """A new symbol that is `hint` at this call. Sizes of 0 and 1 are programs of their own, hence lo."""
        made = Symbol(self, name or f"s{len(self.symbols)}", hint, lo, hi)
        self.symbols.append(made)
        return Size({(made,): 1}, self)

    def unbacked(self, lo: int = 0, hi: int = INFINITY) -> Size:
        """A new symbol that a node of the graph makes. Its hint is as good as any: nothing may follow from
        it.
        """
        made = Symbol(self, f"u{len(self.symbols)}", max(min(_UNBACKED_HINT, hi), lo), lo, hi, unbacked=True)
        self.symbols.append(made)
        return Size({(made,): 1}, self)

    def derived(self, kind: str, a: Size | int, b: Size | int) -> Size | int:
        """The atom of an operation that does not simplify."""
        a, b = self.lift(a), self.lift(b)
        key = kind, a, b
        found = self._derived.get(key)
        if found is None:
            found = self._derived[key] = Derived(self, kind, a, b, _derived_bounds(kind, a, b))
        return size({(found,): 1}, self)

    def lift(self, value: Size | int) -> Size:
        """A number as an expression of this program."""
        return value if type(value) is Size else Size({(): int(value)} if value else {}, self)

    def ask(self, kind: Literal[">=", "=="], expr: Size | int) -> bool:
        """Whether `expr >= 0` (`expr == 0`): proved, or as it is at this call, with a guard."""
        if type(expr) is not Size:
            return expr >= 0 if kind == ">=" else expr == 0
        key = kind, expr
        answer = self._answers.get(key)
        if answer is None:
            answer = prove(kind, expr)
            if answer is None:
                answer = self._assume(kind, expr)
            self._answers[key] = answer
        return answer

    def _assume(self, kind: Literal[">=", "=="], expr: Size) -> bool:
        """Take the hint's answer and note it."""
        if any(symbol.unbacked for symbol in expr.symbols):
            raise self.undecided(f"{expr} {kind} 0")
        answer = expr.hint >= 0 if kind == ">=" else expr.hint == 0
        if _greatest(expr) > INFINITY:
            list(map(int, [Size({(symbol,): 1}, self) for symbol in expr.symbols]))  # no guard could say so
        elif kind == "==":
            self.assume(Guard("==" if answer else "!=", expr, self.where()))
        else:
            self.assume(Guard(">=", expr if answer else -expr - 1, self.where()))
        return answer

    def assume(self, guard: Guard) -> None:
        """Note a guard, which holds at this call: the program is right where it does."""
        if self.settled:
            raise _too_late(repr(guard))
        same = guard.expr if guard.kind == ">=" else min(guard.expr, -guard.expr, key=repr)
        self._guards.setdefault((guard.kind, same), guard)
        self._know(guard)

    @contextlib.contextmanager
    def reopened(self) -> Iterator[None]:
        """For callers that check assumptions made within by themselves."""
        names = ("settled", "fixed", "told", "_guards", "_derived", "_answers")
        before = {name: copy.copy(getattr(self, name)) for name in names}
        bounds = [(symbol, symbol.lo, symbol.hi) for symbol in self.symbols]
        self.settled = False
        try:
            yield
        finally:  # what else is compiled for these symbols may not rely on it
            vars(self).update(before)
            for symbol, lo, hi in bounds:
                symbol.lo, symbol.hi = lo, hi

    def tell(self, kind: Literal[">=", "==", "!="], expr: Size | int) -> None:
        """`expr >= 0` (`== 0`, `!= 0`) holds from here on, since the program checks it itself or eager would
        raise: no guard.
        """
        if type(expr) is Size:
            self.told.append(f"{kind} {expr}")
            self._know(Guard(kind, expr))

    def _know(self, guard: Guard) -> None:
        """Answer the same question alike, and learn what a guard on one symbol, `c * symbol + number`, says
        of its range.
        """
        self._answers[">=" if guard.kind == ">=" else "==", guard.expr] = guard.kind != "!="
        rest = {m: c for m, c in guard.expr.terms.items() if m}
        if guard.kind == "==" and len(rest) == 2:
            self._unify(rest, guard.expr)
        ((monomial, c),) = rest.items() if len(rest) == 1 else [((), 0)]
        if len(monomial) != 1 or type(monomial[0]) is not Symbol:
            return
        symbol, number = monomial[0], -guard.expr.terms.get((), 0)
        if guard.kind == ">=" and c > 0:
            symbol.lo = max(symbol.lo, -(-number // c))
        elif guard.kind == ">=":
            symbol.hi = min(symbol.hi, number // c)
        elif guard.kind == "!=" and symbol.lo * c == number:
            symbol.lo += 1
        elif guard.kind == "==":
            self.fixed[symbol] = number // c

    def _unify(self, rest: dict[Monomial, int], expr: Size) -> None:
        """`symbol == other symbol`: the one with the tighter lower bound stands for both from now on."""
        if {len(m) for m in rest} != {1} or len(expr.terms) > 2 or sum(rest.values()) != 0:
            return
        kept, gone = sorted((m[0] for m in rest), key=lambda atom: (-atom.lo, atom.order))
        if (
            type(kept) is Symbol
            and type(gone) is Symbol
            and gone not in self.fixed
            and kept not in self.fixed
        ):
            self.fixed[gone] = Size({(kept,): 1}, self)

    def bind(self, values: Mapping[str, int]) -> dict[Symbol, int]:
        """Values by symbol from values by name."""
        return {symbol: values[symbol.name] for symbol in self.symbols if symbol.name in values}

    @property
    def hints(self) -> dict[Symbol, int]:
        """The symbols' values at the call that is being compiled."""
        return {symbol: symbol.hint for symbol in self.symbols}

    def admits(self, of: Mapping[Symbol, int]) -> bool:
        """Whether a program compiled under these guards is right for these values."""
        return all(s.lo <= of[s] <= s.hi for s in self.symbols) and all(
            g.holds(of) for g in self._guards.values()
        )


@final
class Size:
    """A sum of integer multiples of products of atoms; never a plain number (`size` gives an int where it is
    one).
    """

    __slots__ = ("terms", "env", "_hash", "_hint", "_text")

    def __init__(self, terms: dict[Monomial, int], env: ShapeEnv) -> None:
        self.terms, self.env = terms, env
        self._hash: int | None = None
        self._hint: int | None = None
        self._text: str | None = None

    # Value --------------------------------------------------------------------------------------------------
    @property
    def hint(self) -> int:
        """Its value at the call that is being compiled: for costs and choices that are right for every
        value.
        """
        if self._hint is None:
            total = 0
            for monomial, c in self.terms.items():
                for atom in monomial:
                    c *= atom.hint
                total += c
            self._hint = total
        return self._hint

    def value(self, of: Mapping[Symbol, int]) -> int:
        """Its value, given the symbols'."""
        total = 0
        for monomial, c in self.terms.items():
            for atom in monomial:
                c *= atom.value(of)
            total += c
        return total

    @property
    def symbols(self) -> frozenset[Symbol]:
        """The symbols that it depends on."""
        found: set[Symbol] = set()
        for monomial in self.terms:
            for atom in monomial:
                found |= {atom} if type(atom) is Symbol else atom.a.symbols | atom.b.symbols
        return frozenset(found)

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest value, by intervals."""
        lo = hi = 0
        for monomial, c in self.terms.items():
            a, b = _monomial_bounds(monomial)
            a, b = (c * a, c * b) if c > 0 else (c * b, c * a)
            lo, hi = lo + a, hi + b
        return max(lo, -INFINITY), min(hi, INFINITY)

    def same(self, other: Any) -> bool:
        """Whether both are the same expression; asks nothing."""
        return self is other or type(other) is Size and self.terms == other.terms

    def __hash__(self) -> int:
        if self._hash is None:
            # Python's -1 and -2 have one hash: tables would ask whether -n and -2*n are equal.
            self._hash = hash(
                ("Size", frozenset([(m, 2 * c if c > 0 else 1 - 2 * c) for m, c in self.terms.items()]))
            )
        return self._hash

    def __repr__(self) -> str:
        if self._text is None:
            self._text = _text(self.terms)
        return self._text

    def __format__(self, spec: str) -> str:
        text = repr(self)
        return f"({text})" if len(self.terms) > 1 else text

    # Arithmetic ---------------------------------------------------------------------------------------------
    def __add__(self, other: Any) -> Any:
        terms = _terms(other)
        if terms is None:
            return NotImplemented
        total = dict(self.terms)
        for monomial, c in terms.items():
            total[monomial] = total.get(monomial, 0) + c
        return size(total, self.env)

    __radd__ = __add__

    def __neg__(self) -> Size:
        return Size({m: -c for m, c in self.terms.items()}, self.env)

    def __pos__(self) -> Size:
        return self

    def __sub__(self, other: Any) -> Any:
        return NotImplemented if _terms(other) is None else self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return NotImplemented if _terms(other) is None else -self + other

    def __mul__(self, other: Any) -> Any:
        terms = _terms(other)
        if terms is None:
            return NotImplemented
        total: dict[Monomial, int] = {}
        for a, ca in self.terms.items():
            for b, cb in terms.items():
                product = tuple(sorted((*a, *b), key=_order)) if a and b else a or b
                total[product] = total.get(product, 0) + ca * cb
        return size(total, self.env)

    __rmul__ = __mul__

    def __floordiv__(self, n: Any) -> Any:
        return divide(self.env, self, n)[0] if _terms(n) is not None else NotImplemented

    def __rfloordiv__(self, n: Any) -> Any:
        return divide(self.env, n, self)[0] if _terms(n) is not None else NotImplemented

    def __mod__(self, n: Any) -> Any:
        return divide(self.env, self, n)[1] if _terms(n) is not None else NotImplemented

    def __rmod__(self, n: Any) -> Any:
        return divide(self.env, n, self)[1] if _terms(n) is not None else NotImplemented

    def __divmod__(self, n: Any) -> Any:
        return divide(self.env, self, n) if _terms(n) is not None else NotImplemented

    def __pow__(self, n: Any) -> Any:
        if type(n) is not int or not 0 <= n <= 8:
            return int(self) ** n
        result: Any = 1
        for _ in range(n):
            result = result * self
        return result

    def __truediv__(self, other: Any) -> float:
        return int(self) / other

    def __rtruediv__(self, other: Any) -> float:
        return other / int(self)

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    # Questions ----------------------------------------------------------------------------------------------
    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        terms = _terms(other)
        return NotImplemented if terms is None else self.env.ask("==", self - other)

    def __ne__(self, other: Any) -> bool:
        return NotImplemented if _terms(other) is None else not self == other

    def __ge__(self, other: Any) -> bool:
        return NotImplemented if _terms(other) is None else self.env.ask(">=", self - other)

    def __gt__(self, other: Any) -> bool:
        return NotImplemented if _terms(other) is None else self.env.ask(">=", self - other - 1)

    def __le__(self, other: Any) -> bool:
        return NotImplemented if _terms(other) is None else self.env.ask(">=", other - self)

    def __lt__(self, other: Any) -> bool:
        return NotImplemented if _terms(other) is None else self.env.ask(">=", other - self - 1)

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        """The value at this call; guarded: the program is right for no other."""
        self.env.ask("==", self - self.hint)
        return self.hint

    __int__ = __index__

    def __float__(self) -> float:
        return float(int(self))


Dim = int | Size  # a size, stride or offset: a number, or an expression where it differs between calls
Dims = tuple[Dim, ...]


def size(terms: dict[Monomial, int], env: ShapeEnv) -> Size | int:
    """The expression of these terms, an int where it is one."""
    kept = {m: c for m, c in terms.items() if c}
    if not kept:
        return 0
    return kept[()] if len(kept) == 1 and () in kept else Size(kept, env)


def contiguous_stride(shape: Sequence[Dim]) -> Dims:
    """Row-major strides of a shape, in elements; a dimension of size 0 counts as 1, as in PyTorch."""
    stride: list[Dim] = []
    step: Dim = 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1) if type(n) is not Size else maximum(n.env, n, 1)
    return tuple(reversed(stride))


def packed(dims: Iterable[tuple[Dim, Dim]], same: Callable[[Dim, Dim], bool] = operator.eq) -> bool:
    """Whether dimensions (size, stride), the innermost first, follow each other without holes; those
    of size 1 do not count. `same` asks of sizes that differ between calls, or proves.
    """
    step: Dim = 1
    for n, stride in dims:
        if not same(n, 1) and not same(stride, step):
            return False
        step = step * n
    return True


def is_contiguous(shape: Sequence[Dim], stride: Sequence[Dim]) -> bool:
    """Row-major without holes, as `Tensor.is_contiguous()` says it."""
    if is_unbacked(*shape) and equal(tuple(stride), contiguous_stride(shape)):
        return True
    return packed(zip(reversed(shape), reversed(stride), strict=True)) or any(n == 0 for n in shape)


def numbers(sizes: Iterable[Dim]) -> tuple[int, ...]:
    """Sizes as plain numbers; those of symbols are asked for, so the program is right for no others."""
    return tuple(map(int, sizes))


def hint(value: Size | int) -> int:
    """A number's value at the call that is being compiled; asks nothing, so only choices that are right
    anyway may use it.
    """
    return value.hint if type(value) is Size else value


def mapped(leaf: Callable[[Any], Any], value: Any) -> Any:
    """`leaf` of each thing that tuples, lists and dicts hold."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(leaf, v) for v in value])
    return {name: mapped(leaf, v) for name, v in value.items()} if kind is dict else leaf(value)


_HOLDERS = (tuple, list, dict)  # asked of each argument of each op


def leaves_in(value: Any) -> list[Any]:
    """The things that tuples, lists and dicts hold."""
    if not isinstance(value, _HOLDERS):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [leaf for v in items for leaf in (leaves_in(v) if isinstance(v, _HOLDERS) else (v,))]


def evaluate(value: Any, of: Mapping[Symbol, Any]) -> Any:
    """Arguments with each size's value in its place: lists, tuples and dicts by element."""
    return mapped(lambda leaf: leaf.value(of) if type(leaf) is Size else leaf, value)


def is_symbolic(values: Any) -> bool:
    """Whether one of these sizes is an expression."""
    return Size in map(type, values)


def is_unbacked(*values: Any) -> bool:
    """Whether one of these sizes follows from data: its hint is no answer."""
    return any(type(value) is Size and any(s.unbacked for s in value.symbols) for value in values)


def _too_late(question: str) -> Exception:
    return InternalError(
        "DM919",
        "a size was asked for something after the program's guards were made",
        why=f"whether {question} was to be taken for true at each call",
        cure="report it; the graph runs op by op",
    )


def _undecided(question: str) -> Exception:
    return DataDependent(
        "DM210",
        f"whether {question} depends on the data of a tensor",
        cure="say what holds with torch._check(...), or let the graph break here",
    )


def known(kind: Literal[">=", "=="], value: Size | int) -> bool:
    """Whether `value >= 0` (`value == 0`) for all values that the symbols may take; asks nothing."""
    if type(value) is not Size:
        return value >= 0 if kind == ">=" else value == 0
    return prove(kind, value) is True


def divides(n: Size | int, value: Size | int) -> bool:
    """Whether n divides the value whatever the symbols are; asks nothing."""
    if type(value) is Size:
        env = value.env
    elif type(n) is Size:
        env = n.env
    else:
        return value % n == 0
    return not _split(env, env.lift(value), env.lift(n))[1].terms


def equal(a: Any, b: Any) -> bool:
    """Whether two numbers, or two tuples of numbers, are the same whatever the symbols are; asks nothing."""
    if a is b:
        return True
    if type(a) is tuple:
        return type(b) is tuple and len(a) == len(b) and all(map(equal, a, b))
    return known("==", a - b) if type(a) is Size or type(b) is Size else a == b


def split(a: Size | int, n: Size | int) -> tuple[Size | int, Size | int]:
    """(q, r) with a == n * q + r, q holding the terms of a that n divides; r may be anything."""
    if type(a) is Size:
        env = a.env
    elif type(n) is Size:
        env = n.env
    else:
        return divmod(a, n)
    whole, rest = _split(env, env.lift(a), env.lift(n))
    return size(whole.terms, env), size(rest.terms, env)


def divide(env: ShapeEnv, a: Size | int, n: Size | int) -> tuple[Size | int, Size | int]:
    """(a // n, a % n)."""
    if type(n) is not Size and type(a) is not Size:
        return divmod(a, n)
    if type(n) is not Size and n == 0:
        raise ZeroDivisionError("integer division or modulo by zero")
    whole, rest = _split(env, env.lift(a), env.lift(n))
    q, r = size(whole.terms, env), size(rest.terms, env)
    if known(">=", r) and known(">=", n - r - 1):
        return q, r
    return q + env.derived("floordiv", r, n), env.derived("mod", r, n)


def _split(env: ShapeEnv, a: Size, n: Size) -> tuple[Size, Size]:
    """(q, r) with a == n * q + r, q holding the terms that n divides (a number or a product of atoms, times a
    number).
    """
    if len(n.terms) > 1:  # a sum divides its own multiples only
        return _split_by_sum(env, a, n)
    ((factors, c),) = n.terms.items() or [((), 0)]
    whole: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, k in a.terms.items():
        left = _without(monomial, factors)
        if left is None:
            rest[monomial] = k
            continue
        q, r = divmod(k, c) if not factors and not monomial else (k // c, 0) if k % c == 0 else (0, k)
        if q:
            whole[left] = whole.get(left, 0) + q
        if r:
            rest[monomial] = r
    return Size(whole, env), Size(rest, env)


def _split_by_sum(env: ShapeEnv, a: Size, n: Size) -> tuple[Size, Size]:
    """Long division by a sum, by its leading term; the remainder is the rest when that stops."""
    lead = max(n.terms, key=_degree)
    whole: Size | int = 0
    rest: Size | int = size(a.terms, env)
    for _ in range(8):
        if type(rest) is not Size:
            break
        top = max(rest.terms, key=_degree)
        left = _without(top, lead)
        if left is None or rest.terms[top] % n.terms[lead]:
            break
        step = size({left: rest.terms[top] // n.terms[lead]}, env)
        whole, rest = whole + step, rest - n * step
    if type(rest) is Size and not rest.same(a) and len(rest.terms) >= len(a.terms):
        return Size({}, env), a  # nothing became simpler
    return env.lift(whole), env.lift(rest)


def minimum(env: ShapeEnv, a: Size | int, b: Size | int) -> Size | int:
    """min(a, b) without asking which."""
    if known(">=", b - a):
        return a
    return b if known(">=", a - b) else env.derived("min", a, b)


def maximum(env: ShapeEnv, a: Size | int, b: Size | int) -> Size | int:
    """max(a, b) without asking which; `max(size, 1)` in strides asks: sizes of 0 are programs of their
    own.
    """
    if type(b) is not Size and b == 1 and not is_unbacked(a):
        return a if a >= 1 else 1
    if known(">=", a - b):
        return a
    return b if known(">=", b - a) else env.derived("max", a, b)


def prove(kind: Literal[">=", "=="], expr: Size) -> bool | None:
    """The answer when it is the same for all values that the symbols may take, else None."""
    expr_or_int = settled(expr)
    if type(expr_or_int) is not Size:
        return expr_or_int >= 0 if kind == ">=" else expr_or_int == 0
    for form in (expr_or_int, _without_quotients(expr_or_int)):
        lowest, highest = _range(form)
        if highest < 0 or kind == "==" and lowest > 0:
            return False
        if kind == ">=" and lowest >= 0:
            return True
    least, most = (_least_without_choices(form) for form in (expr_or_int, -expr_or_int))
    if kind == ">=" and least >= 0:
        return True
    return False if most > 0 or kind == "==" and least > 0 else None


def _least_without_choices(expr: Size) -> int:
    """A lower bound, with either side in the place of a `min` taken away or of a `max` added."""
    found = [-INFINITY]
    for monomial, c in expr.terms.items():
        atom = monomial[0] if len(monomial) == 1 else None
        if type(atom) is Derived and atom.kind == ("min" if c < 0 else "max"):
            rest = expr - Size({monomial: c}, expr.env)
            forms = (rest + side * c for side in (atom.a, atom.b))
            found += [_range(form)[0] if type(form) is Size else int(form) for form in forms]
    return max(found)


def _without_quotients(expr: Size) -> Size:
    """A multiple of the expression in which `k * floordiv(a, k)` is written as `a - mod(a, k)`: the sign
    stays.
    """
    found = {
        m[0]
        for m in expr.terms
        if len(m) == 1
        and type(m[0]) is Derived
        and m[0].kind == "floordiv"
        and m[0].b.terms.keys() == {()}
        and m[0].b.terms[()] > 0
    }
    for atom in sorted(found, key=lambda a: (-len(repr(a)), repr(a))):  # those of others first
        if (atom,) not in expr.terms:  # what another was written as took it away
            continue
        k = atom.b.terms[()]
        rest = {m: c * k for m, c in expr.terms.items() if m != (atom,)}
        quotient = (atom.a - expr.env.derived("mod", atom.a, k)) * expr.terms[atom,]
        scaled = size(rest, expr.env) + quotient
        if type(scaled) is not Size:
            return expr
        expr = scaled
    return expr


def settled(expr: Size) -> Size | int:
    """The expression with the symbols that were found to be something else replaced."""
    fixed = expr.env.fixed
    if not fixed or fixed.keys().isdisjoint(expr.symbols):
        return expr

    def value(symbol: Symbol) -> Size | int:
        found = fixed.get(symbol)
        if found is None:
            return Size({(symbol,): 1}, symbol.env)
        return settled(found) if type(found) is Size else found

    return rewritten(expr, value, expr.env)


def rewritten(expr: Size, value: Callable[[Symbol], Size | int], env: ShapeEnv) -> Size | int:
    """The expression with other sizes, which belong to `env`, in the place of its symbols."""
    total: Size | int = 0
    for monomial, c in expr.terms.items():
        product: Size | int = c
        for atom in monomial:
            product = product * (value(atom) if type(atom) is Symbol else _rewritten_atom(atom, value, env))
        total = total + product
    return total


def _rewritten_atom(atom: Derived, value: Callable[[Symbol], Size | int], env: ShapeEnv) -> Size | int:
    a, b = rewritten(atom.a, value, env), rewritten(atom.b, value, env)
    if atom.kind in ("floordiv", "mod"):
        return divide(env, a, b)[atom.kind == "mod"]
    return (minimum if atom.kind == "min" else maximum)(env, a, b)


def _range(expr: Size) -> tuple[int, int]:
    """Bounds; lower ones are found with each atom written as its smallest value plus something that is not
    negative.
    """
    lo, hi = expr.bounds
    if lo < 0:
        lo = max(lo, _shifted_bound(expr))
    if hi > 0:
        hi = min(hi, -_shifted_bound(-expr))
    return lo, hi


def _shifted_bound(expr: Size) -> int:
    """The constant of the expression in `atom - atom.lo`, where no term of it is negative; else minus
    infinity.
    """
    shifted: dict[Monomial, int] = {}
    for monomial, c in expr.terms.items():
        parts: dict[Monomial, int] = {(): c}
        for atom in monomial:
            if atom.lo <= -INFINITY:
                return -INFINITY
            grown: dict[Monomial, int] = {}
            for m, k in parts.items():
                grown[(*m, atom)] = grown.get((*m, atom), 0) + k
                grown[m] = grown.get(m, 0) + k * atom.lo
            parts = grown
        for m, k in parts.items():
            shifted[m] = shifted.get(m, 0) + k
    return -INFINITY if any(k < 0 for m, k in shifted.items() if m) else shifted.get((), 0)


def _monomial_bounds(monomial: Monomial) -> tuple[int, int]:
    lo = hi = 1
    for atom in monomial:
        ends = [x * y for x in (lo, hi) for y in (atom.lo, atom.hi)]
        lo, hi = max(min(ends), -INFINITY), min(max(ends), INFINITY)
    return lo, hi


def _derived_bounds(kind: str, a: Size, b: Size) -> tuple[int, int]:
    (alo, ahi), (blo, bhi) = _range(a), _range(b)
    if kind == "mod":
        return (0, min(bhi - 1, ahi) if alo >= 0 else bhi - 1) if blo > 0 else (-INFINITY, INFINITY)
    if kind == "floordiv":
        if blo <= 0:
            return -INFINITY, INFINITY
        ends = [x if abs(x) >= INFINITY else x // y for x in (alo, ahi) for y in (blo, bhi)]
        return min(ends), max(ends)
    chosen = min if kind == "min" else max
    return chosen(alo, blo), chosen(ahi, bhi)


def _terms(value: Any) -> Mapping[Monomial, int] | None:
    """The terms of a Size or a plain int, None for anything else."""
    if type(value) is Size:
        return value.terms
    return {(): int(value)} if isinstance(value, int) else None


def _without(monomial: Monomial, factors: Monomial) -> Monomial | None:
    """The product without these factors, None when it does not hold them all."""
    if not factors:
        return monomial
    left = list(monomial)
    for atom in factors:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def _order(atom: Atom) -> tuple[int, int, str]:
    return atom.order


def _degree(monomial: Monomial) -> tuple[int, list[tuple[int, int, str]]]:
    return len(monomial), [atom.order for atom in monomial]


def _text(terms: Mapping[Monomial, int]) -> str:
    """The sum as Python and C both read it (`floordiv`, `mod`, `min`, `max` are functions of two numbers
    there).
    """
    parts: list[str] = []
    for monomial, c in sorted(terms.items(), key=lambda term: _degree(term[0]), reverse=True):
        factors = [repr(atom) for atom in monomial]
        if abs(c) != 1 or not factors:
            factors.insert(0, str(abs(c)))
        sign = "-" if c < 0 else "+" if parts else ""
        parts.append(f"{sign} {'*'.join(factors)}" if parts else f"{sign}{'*'.join(factors)}")
    return " ".join(parts) or "0"
