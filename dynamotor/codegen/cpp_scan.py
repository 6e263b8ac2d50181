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
        for s in k.statements():
            if isinstance(s, ScanStatement):
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
        value, best = self.body.value(s.expr, scope), f"a{s.id}"
        if s.kind.startswith("arg"):  # the last of equal values; a NaN stays, and a later one takes its place
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
