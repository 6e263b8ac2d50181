"""The C++ function of a map that reads one thing or another by its position (`cat`, `pad`, `repeat`): each
segment of a row between two boundaries is a loop of its own, which asks nothing and has vectors of its own.

for (row) { if (row is inside) { 0 to 1: fill; 1 to 513: copy; 513 to 514: fill } else { 0 to 514: fill } }
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

from ..lower.index_expr import ZERO, Div, Index, Mod, Var
from ..lower.ir import BOOL, ROWS, Expr, Kernel, Phase, Store, changed, const, masked, of_kind, op, rewrite
from .cpp_body import CppScope
from .cpp_kernel import all_exprs
from .cpp_ops import COMPARISONS
from .cpp_tiles import TilesEmitter
from .lane_conditions import comparisons
from .verify_emitted import verify_places

MOST_LOOPS = 16
MOST_FOLDS = 8
MOST_EXPRS = 400  # of all loops together
_SIGNS = {"and": "&&", "or": "||"}
Answers = Mapping[Expr, bool]


class SegmentsEmitter(TilesEmitter):
    """The "rows" template; maps with boundaries in segments."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        one_loop = self.is_map and len(kernel.inner) == 1 and not self.scatters
        self.cut = one_loop and all(e.op not in ("rand", "wrap_index") for e in self.exprs) and _pays(kernel)

    def _plain(self) -> str:
        alone = _kernels(self.kernel) if self.cut else []
        if not alone:
            return super()._plain()
        return self._all_stored("".join([self._part(piece, None) for piece in alone]))

    def _row(self, row: CppScope, limits: tuple[str, str] | None) -> None:
        if not self.cut or limits is not None:  # a task of part of a row asks at each vector
            super()._row(row, limits)
            return
        row.lines.append(self._all_stored(self._pieces(self.kernel, row)))

    def _all_stored(self, text: str) -> str:
        loops = {*self.kernel.outer, *self.kernel.inner}
        self.stores += [(of_kind(s, Store), loops) for s in self.kernel.statements()]
        return text

    def _pieces(self, kernel: Kernel, row: CppScope) -> str:
        """The statements of one row."""
        condition, parts = _split(kernel)
        texts = [self._pieces(part, row) for part in parts]
        if condition is not None:
            return f"if({self._test(condition, row)}){{{texts[0]}}}else{{{texts[1]}}}"
        return "".join(texts) or self._part(kernel, row)

    def _test(self, condition: Expr, row: CppScope) -> str:
        """A condition by the positions of loops around the row, as C++ text."""
        if condition.op in COMPARISONS:
            position, bound = condition.args
            end = self.number(bound.args[0]) if bound.op == "const" else self.body.index(bound.args[0], row)
            return f"{self.body.index(position.args[0], row)}{COMPARISONS[condition.op]}{end}"
        tests = [f"({self._test(part, row)})" for part in condition.args]
        return f"!{tests[0]}" if condition.op == "not" else _SIGNS[condition.op].join(tests)

    def _part(self, kernel: Kernel, row: CppScope | None) -> str:
        """One segment of a row, or of a loop without rows."""
        part = TilesEmitter(kernel)
        part.body.count, part.body.sizes = self.body.count, self.body.sizes
        if row is None:
            text = part.text()
        else:
            part.take_half_the_lanes()
            inside = CppScope(part.top, row.own.items())
            part._row(inside, None)
            text = "".join(inside.lines)
        verify_places(kernel, part.stores)
        self.body.count = part.body.count
        self.body.widths |= part.body.widths
        return f"{{{''.join(part.top.lines)}{text}}}"


def _kernels(kernel: Kernel) -> list[Kernel]:
    """The segments as kernels of their own, one behind the other: those of a kernel without rows, of whole
    rows that follow each other in memory, and of rows that are read across. None: each row has all segments.
    """
    (v,), condition = kernel.inner, _row_condition(kernel)
    loops = [o for o in kernel.outer if condition is not None and o in condition.vars] or [v]
    pieces = _segments(kernel, loops[0])
    if len(loops) > 1 or any(e.op == "masked" for piece in pieces for e in all_exprs(piece.statements())):
        return []
    flat = [_in_one_loop(piece) for piece in pieces]
    if None not in flat:
        return [piece for piece in flat if piece is not None]
    return pieces if any(TilesEmitter(piece).goes_in_tiles() for piece in pieces) else []


def _in_one_loop(kernel: Kernel) -> Kernel | None:
    """The kernel with its rows as one loop, where all accesses go on from each row to the next."""
    (v,) = kernel.inner
    if len(kernel.outer) != 1:
        return None if kernel.outer else kernel
    (u,) = kernel.outer
    goes_on = (i.is_affine and i.terms.get(u, 0) == v.size * i.terms.get(v, 0) for i in _places(kernel))
    if type(v.size) is not int or not (u.single or all(goes_on)):
        return None
    one = Var(v.name, u.size * v.size)
    return _replaced(kernel, {u: ZERO, v: Index.of(one)}, outer=(), inner=(one,))


def _pays(kernel: Kernel) -> bool:
    """Whether a kernel has boundaries, and few."""
    loops = [*islice(_loops(kernel), MOST_LOOPS + 1)]
    exprs = sum(len(all_exprs(one.statements())) for one in loops)
    return 1 < len(loops) <= MOST_LOOPS and exprs <= MOST_EXPRS


def _loops(kernel: Kernel) -> Iterator[Kernel]:
    """The loops of all rows."""
    _, parts = _split(kernel)
    yield from () if parts else (kernel,)
    for part in parts:
        yield from _loops(part)


def _split(kernel: Kernel) -> tuple[Expr | None, list[Kernel]]:
    """The kernels where a condition of rows holds and where not, or those of a row's segments, if any."""
    condition = _row_condition(kernel)
    if condition is not None:
        return condition, [_known(kernel, {condition: answer}) for answer in (True, False)]
    pieces = _segments(kernel, *kernel.inner)
    return None, pieces if len(pieces) > 1 else []


def _conditions(kernel: Kernel) -> list[Expr]:
    return [e.args[0] for e in all_exprs(kernel.statements()) if e.op == "masked"]


def _row_condition(kernel: Kernel) -> Expr | None:
    """A condition, or a part of one, that is the same for all elements of a row."""
    (v,) = kernel.inner

    def part_without(condition: Expr) -> Expr | None:
        if v not in condition.vars:
            return condition if comparisons(condition) is not None else None
        parts = condition.args if condition.op in ("and", "or", "not") else ()
        return next(filter(None, map(part_without, parts)), None)

    return next(filter(None, map(part_without, _conditions(kernel))), None)


def _segments(kernel: Kernel, v: Var) -> list[Kernel]:
    """The kernel for each segment of a loop, between two boundaries of conditions by the place in it and of
    remainders of the place.
    """
    if type(v.size) is not int:
        return [kernel]
    tests = [c for condition in _conditions(kernel) for c in _comparisons_of(condition, v)]
    cuts = {0, v.size, *(_boundary(c, v) for c in tests), *_folds(kernel, v)}
    return [
        _part_of(_known(kernel, {c: _holds(c, v, start) for c in tests}), v, start, end)
        for start, end in pairwise(sorted(cuts))
    ]


def _folds(kernel: Kernel, v: Var) -> Iterator[int]:
    """The places at which quotients of the place change, where there are few."""
    for atom in (atom for place in _places(kernel) for atom in place.terms):
        if not isinstance(atom, Div | Mod) or type(atom.n) is not int or v.size > MOST_FOLDS * atom.n:
            continue
        if atom.base.terms == {v: 1} and type(atom.base.const) is int:
            yield from range(-atom.base.const % atom.n, v.size, atom.n)


def _places(kernel: Kernel) -> list[Index]:
    """All indices."""
    read = [place for e in all_exprs(kernel.statements()) for place in e.indices()]
    return read + [of_kind(s, Store).index for s in kernel.statements()]


def _comparisons_of(condition: Expr, v: Var) -> Iterator[Expr]:
    """The comparisons in a condition of positions that depend on v alone with numbers."""
    if condition.op in ("and", "or", "not"):
        for part in condition.args:
            yield from _comparisons_of(part, v)
    elif condition.op in ("lt", "le", "gt", "ge"):
        position, bound = condition.args
        if position.op == "index" and bound.op == "const" and position.args[0].terms.keys() == {v}:
            yield condition


def _holds(comparison: Expr, v: Var, at: int) -> bool:
    position, bound = comparison.args
    index: Index = position.args[0]
    answer: bool = getattr(operator, comparison.op)(index.terms[v] * at + index.const, bound.args[0])
    return answer


def _boundary(comparison: Expr, v: Var) -> int:
    """The first place at which a comparison has another answer than at 0."""
    first = _holds(comparison, v, 0)
    return bisect.bisect_left(range(v.size), True, key=lambda at: _holds(comparison, v, at) != first)


def _part_of(kernel: Kernel, v: Var, start: int, end: int) -> Kernel:
    """The kernel for the places of a loop from start to end."""
    part = Var(v.name, end - start)
    loops = {name: tuple(part if o is v else o for o in getattr(kernel, name)) for name in ("outer", "inner")}
    return _replaced(kernel, {v: Index.of(part) + start}, **loops)


def _replaced(kernel: Kernel, places: Mapping[Var, Index], **fields: Any) -> Kernel:
    """The kernel with other loops, whose variables its expressions are made of."""
    (phase,) = kernel.phases
    inner = [changed(s, lambda e: e.subst(places), lambda i: i.subst(places)) for s in phase.inner]
    return replace(kernel, phases=(Phase(tuple(inner)),), **fields)


def in_digits(kernel: Kernel) -> Kernel:
    """A map whose loops over rows are split where they repeat (`row % 64`), if it goes in tiles then."""
    split: dict[Var, Index] = {}
    outer: list[Var] = []
    plain = kernel.template == ROWS and len(kernel.phases) == 1 and not kernel.phases[0].row
    is_map = plain and all(isinstance(s, Store) for s in kernel.statements())
    for v in kernel.outer if is_map and not kernel.final and not kernel.final_once else ():
        sizes = {
            a.n
            for i in _places(kernel)
            for a in i.terms
            if isinstance(a, Div | Mod) and a.base == Index.of(v)
        }
        n = sizes.pop() if len(sizes) == 1 else 0
        if type(n) is int and type(v.size) is int and n and not v.size % n:
            high, low = Var(f"{v.name}h", v.size // n), Var(f"{v.name}l", n)
            split[v] = Index.of(high) * n + Index.of(low)
            outer += [high, low]
        else:
            outer.append(v)
    in_parts = _replaced(kernel, split, outer=tuple(outer)) if split else kernel
    return in_parts if split and TilesEmitter(in_parts).goes_in_tiles() else kernel


def _known(kernel: Kernel, answers: Answers) -> Kernel:
    """The kernel where the answers of some conditions are known."""
    memo: dict[Expr, Expr] = {}
    (phase,) = kernel.phases
    inner = [changed(s, lambda e: _chosen(e, answers, memo)) for s in phase.inner]
    return replace(kernel, phases=(Phase(tuple(inner)),))


def _chosen(e: Expr, answers: Answers, memo: dict[Expr, Expr]) -> Expr:
    """An expression without the branches that are not taken."""

    def leaf(one: Expr) -> Expr | None:
        if one.op != "masked":
            return None
        branches = (_chosen(branch, answers, memo) for branch in one.args[1:])
        return masked(_answered(one.args[0], answers), *branches)

    return rewrite(e, leaf, memo=memo)


def _answered(condition: Expr, answers: Answers) -> Expr:
    """A condition of which some parts are known."""
    if condition in answers:
        return const(answers[condition], BOOL)
    if condition.op not in ("and", "or", "not"):
        return condition
    parts = [_answered(part, answers) for part in condition.args]
    if condition.op == "not" and parts[0].op == "const":
        return const(not parts[0].args[0], BOOL)
    return op(condition.op, *parts)
