"""The C++ function of a "scan" kernel: rows in parallel, each gone through in order with running results.

for (row) { a0 = 0; for (i) { a0 = a0 + x[i]; y[i] = a0 * 2; } }
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.spec import numel
from ..lower.index_expr import Var
from ..lower.ir import ScanStatement, Store, of_kind
from ..runtime.cpp_text import loop
from .cpp_body import CppScope
from .cpp_kernel import Emitter
from .cpp_ops import COMBINE, ctype, reduce_start


class ScanEmitter(Emitter):
    """The "scan" template."""

    def text(self) -> str:
        k = self.kernel
        row = CppScope(self.top, [(v, self.vars[v]) for v in k.outer])
        scans = [s for s in k.statements() if isinstance(s, ScanStatement)]
        beside = {(s.kind.removeprefix("arg"), s.expr): s for s in scans if s.kind.startswith("arg")}
        # A running extreme of floats is the value at its position, which costs nothing: its branch is
        # foreseen, where each maximum would wait for the one before. Integers have ties, and quicker maxima.
        floats = [s for s in scans if s.expr.dtype.is_floating_point]
        self.at = {s.id: beside[s.kind, s.expr] for s in floats if (s.kind, s.expr) in beside}
        self.done: set[int] = set()
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
        scope = CppScope(parent, [(v, name)])
        if len(loops) > 1:
            self._nest(loops[1:], scope)
        else:
            for s in self.kernel.phases[0].inner:
                if isinstance(s, ScanStatement):
                    self._step(s, scope)
                else:
                    self.store(of_kind(s, Store), scope)
        parent.lines.append(loop(name, self.number(v.size), scope.lines))

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
        elif s.kind.startswith(
            "arg"
        ):  # the last of equal values; a NaN stays, and a later one takes its place
            sign = ">=" if s.kind == "argmax" else "<="
            assert s.position is not None
            place = self.body.index(s.position, scope)
            scope.lines.append(
                f"if({value}!={value}||({best}=={best}&&{value}{sign}{best}))"
                f"{{{best}={value};{best}at={place};}}"
            )
            result, kept = f"{best}at", "i64"
        else:
            scope.lines.append(f"{best}={COMBINE[s.kind].format(best, value)};")
            result, kept = best, ctype(s.expr.dtype, 1)
        if s.id in self.scans:
            name = self.body.fresh()
            scope.lines.append(f"const {kept} {name}={result};")
            scope.values[self.scans[s.id]] = name, 1
