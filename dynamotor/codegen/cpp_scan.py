"""The C++ function of a "scan" kernel: rows in parallel, each gone through in order with running results.

for (row) { a0 = 0; for (i) { a0 = a0 + x[i]; y[i] = a0 * 2; } }

A running extreme of floats stays in most vectors of elements: these are compared and stored at once. One of
bytes, which has ties, is that of numbers made of the byte and, below it, the position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph.sizes import divides
from ..graph.spec import numel
from ..lower.index_expr import Var, is_one, is_zero
from ..lower.ir import I32, I64, Expr, ScanStatement, Store, fits, of_kind
from ..lower.whole_ranges import range_of
from ..runtime.cpp_text import loop
from .cpp_body import CppScope
from .cpp_kernel import Emitter
from .cpp_ops import COMBINE, ctype, reduce_start

_NO_VECTORS = ("masked", "rand", "wrap_index", "index")
_BEYOND = {"argmax": "gt", "argmin": "lt"}
PLACE = 23  # bits of a position below a byte


class ScanEmitter(Emitter):
    """The "scan" template."""

    def text(self) -> str:
        k = self.kernel
        row = CppScope(self.top, [(v, self.vars[v]) for v in k.outer])
        scans = [s for s in k.statements() if isinstance(s, ScanStatement)]
        beside = {(s.kind.removeprefix("arg"), s.expr): s for s in scans if s.kind.startswith("arg")}
        # A running extreme is the value at its position, which costs nothing. Floats take a branch, which is
        # foreseen, where each maximum would wait for the one before; integers have ties, and quick choices.
        self.at = {s.id: beside[s.kind, s.expr] for s in scans if (s.kind, s.expr) in beside}
        self.done: set[int] = set()
        self.places = [s for s in scans if s.kind.startswith("arg")]
        self.body.widths |= {self.width} - {1}
        for s in scans:
            if s.id not in self.at:
                row.lines.append(f"{ctype(s.expr.dtype, 1)} a{s.id}={reduce_start(s.kind, s.expr.dtype)};")
                row.lines += [f"i64 a{s.id}at=0;"] if s.kind.startswith("arg") else []
        self._nest(k.inner, row)
        tasks = numel(v.size for v in k.outer)
        head = self.decode("task", k.outer, self.vars) if k.outer else ""
        return self.over("task", tasks, self.number(tasks), head + "".join(row.lines))

    def _nest(self, loops: Sequence[Var], parent: CppScope) -> None:
        v, name = loops[0], self.vars[loops[0]]
        if len(loops) > 1:
            scope = CppScope(parent, [(v, name)])
            self._nest(loops[1:], scope)
            parent.lines.append(loop(name, self.number(v.size), scope.lines))
        elif self._in_vectors(v):
            parent.lines.append(self._in_keys(v, parent) if self.keys else self._vectors(v, parent))
        else:
            parent.lines.append(loop(name, self.number(v.size), self._element(v, name, parent)))

    def _element(self, v: Var, name: str, parent: CppScope) -> list[str]:
        scope = CppScope(parent, [(v, name)])
        self.done.clear()
        for s in self.kernel.phases[0].inner:
            if isinstance(s, ScanStatement):
                self._step(s, scope)
            else:
                self.store(of_kind(s, Store), scope)
        return scope.lines

    def _in_vectors(self, v: Var) -> bool:
        """Whether all running results are extremes of integers, or of floats with positions, and accesses are
        in order.
        """
        inner = self.kernel.phases[0].inner
        alone = self._alone()
        floats = all(s in self.places and s.expr.dtype.is_floating_point for s in alone)
        self.keys = all(_has_keys(s, v) if s in self.places else _is_extreme(s) for s in alone)
        steps = [e.args[1].coefficient(v) for e in self.exprs if e.op == "load"]
        steps += [s.index.coefficient(v) for s in inner if isinstance(s, Store)]
        even = all(step is not None and (is_one(step) or is_zero(step)) for step in steps)
        return (
            (floats or self.keys)
            and even
            and self.width > 1
            and all(e.op not in _NO_VECTORS for e in self.exprs)
        )

    def _vectors(self, v: Var, parent: CppScope) -> str:
        name, width, size = self.vars[v], self.width, self.number(v.size)
        one = f"{name}_0"
        scope = CppScope(parent, [(v, name)], width, v)
        stays = CppScope(scope, (), width, v, closed=True)
        below = []
        for place in self.places:
            value = self.body.operand(place.expr, scope, width)
            below.append(f"{_BEYOND[place.kind]}(bc<{ctype(place.expr.dtype, width)}>(a{place.id}),{value})")
        for s in self.kernel.phases[0].inner:
            if isinstance(s, Store):
                self.store(s, stays)
            elif s.id in self.scans:
                result = f"a{self.at[s.id].id}" if s.id in self.at else f"a{s.id}at"
                stays.values[self.scans[s.id]] = result, 1
        each = loop(one, f"{name}+{width}", self._element(v, one, parent), start=name)
        scope.lines.append(f"const bool stays_=!some(~({'&'.join(below)}));")
        scope.lines.append(f"if(stays_){{{''.join(stays.lines)}}}else{{{each}}}")
        text = loop(name, size, scope.lines, start=None, step=width)
        if not divides(width, v.size):
            text += loop(name, size, self._element(v, name, parent), start=None)
        return f"{{i64 {name}=0;{text}}}"

    def _in_keys(self, v: Var, parent: CppScope) -> str:
        """The loop over vectors of integers, or of bytes and positions as one number each: of equal bytes the
        last one has the greatest position, or the least if counted down.
        """
        name, width, size = self.vars[v], self.width, self.number(v.size)
        scope, start, end = CppScope(parent, [(v, name)], width, v), "", ""
        for s in self._alone():
            kind, best, key = s.kind.removeprefix("arg"), f"a{s.id}k", self.body.fresh()
            t, found = ctype(s.expr.dtype, width), self.body.operand(s.expr, scope, width)
            if s in self.places:
                found = f"{found}<<{PLACE}|{_place(s, f'((int){name}+iota<{t}>())')}"
            scope.lines.append(f"const {t} {key}={kind}_({best},running_{kind}_({found}));")
            scope.lines.append(f"{best}=of_last_({key});")
            start += f"{t} {best}=bc<{t}>({reduce_start(kind, s.expr.dtype)});"
            end += f"a{s.id}={best}[0];"
            end += f"a{s.id}at={_place(s, f'a{s.id}')};a{s.id}>>={PLACE};" if s in self.places else ""
            self._name_results(s, key, scope)
        for stored in self.kernel.phases[0].inner:
            if isinstance(stored, Store):
                self.store(stored, scope)
        text = start + loop(name, size, scope.lines, start=None, step=width)
        if not divides(width, v.size):
            text += end + loop(name, size, self._element(v, name, parent), start=None)
        return f"{{i64 {name}=0;{text}}}"

    def _alone(self) -> list[ScanStatement]:
        """The scans that are gone through themselves."""
        scans = [s for s in self.kernel.phases[0].inner if isinstance(s, ScanStatement)]
        return [s for s in scans if s.id not in self.at]

    def _name_results(self, s: ScanStatement, key: str, scope: CppScope) -> None:
        """The values of a scan, and of the extremes that have its positions."""
        wide = f"cvt<{ctype(I64, scope.width)}>({_place(s, key)})"
        found = {s.id: (wide, I64) if s in self.places else (key, s.expr.dtype)}
        found |= {id: (f"{key}>>{PLACE}", s.expr.dtype) for id, place in self.at.items() if place is s}
        for id in found.keys() & self.scans.keys():
            text, dtype = found[id]
            name = self.body.fresh()
            scope.lines.append(f"const {ctype(dtype, scope.width)} {name}={text};")
            scope.values[self.scans[id]] = name, scope.width

    def holds(self, e: Expr, memory: torch.dtype) -> bool:
        """An extreme is one of its values."""
        scans = [s for s in self.kernel.statements() if isinstance(s, ScanStatement)]
        extremes = {self.scans.get(s.id): s for s in scans if s.kind in ("max", "min")}
        return fits(extremes[e].expr, memory) if e in extremes else super().holds(e, memory)

    def _step(self, s: ScanStatement, scope: CppScope) -> None:
        """One element more in a running result."""
        if s.id in self.done:
            return
        self.done.add(s.id)
        value, best = self.body.value(s.expr, scope), f"a{s.id}"
        if s.id in self.at:
            self._step(self.at[s.id], scope)
            best = f"a{self.at[s.id].id}"
            result, kept = best, ctype(s.expr.dtype, 1)
        elif s.kind.startswith("arg"):  # the last of equal values
            stays = f"{value}{'<' if s.kind == 'argmax' else '>'}{best}"
            assert s.position is not None
            place = self.body.index(s.position, scope)
            if s.expr.dtype.is_floating_point:  # a NaN stays, and a later one takes its place
                test = f"!({stays})&&({value}!={value}||{best}=={best})"
                scope.lines.append(f"if({test}){{{best}={value};{best}at={place};}}")
            else:
                scope.lines.append(f"{best}at={stays}?{best}at:{place};{best}={stays}?{best}:{value};")
            result, kept = f"{best}at", "i64"
        else:
            scope.lines.append(f"{best}={COMBINE[s.kind].format(value, best)};")  # the last of equal values
            result, kept = best, ctype(s.expr.dtype, 1)
        if s.id in self.scans:
            name = self.body.fresh()
            scope.lines.append(f"const {kept} {name}={result};")
            scope.values[self.scans[s.id]] = name, 1


def _place(s: ScanStatement, key: str) -> str:
    """The position in a key, and the key's part of a position."""
    at = f"({key}&{(1 << PLACE) - 1})"
    return at if s.kind == "argmax" else f"({(1 << PLACE) - 1}-{at})"


def _has_keys(s: ScanStatement, v: Var) -> bool:
    """Whether a value and its position fit in one number."""
    bounds = range_of(s.expr)
    byte = bounds is not None and bounds[0] >= -128 and bounds[1] <= 255
    return byte and type(v.size) is int and v.size < 1 << PLACE


def _is_extreme(s: ScanStatement) -> bool:
    return s.kind in ("max", "min") and s.expr.dtype in (I32, I64)
