"""The C++ function of a "cols" kernel: sums down the columns, a block of columns per task, accumulators in
registers.

for (block of columns) { for (middle rows) acc[u] += ...; final statements }

Columns are cut into chunks first where there are few.
"""

from __future__ import annotations

from ..graph.sizes import Dim, Size, divides
from ..graph.spec import numel
from ..lower.index_expr import Index, Var, is_zero, row_major
from ..lower.ir import Kernel, Reduce, Store, of_kind
from ..runtime.cpp_text import loop
from .cpp_body import CppScope
from .cpp_kernel import FINAL, ONCE, TAIL, Emitter, beyond, times
from .cpp_ops import ctype, kept_type, reduce_start
from .cpp_sums import Strips, loses


class ColsEmitter(Emitter):
    """The "cols" template."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.take_lanes()
        self.outer = [*kernel.outer, *kernel.inner[:-1]]
        self.reductions = [s for s in kernel.phases[0].inner if isinstance(s, Reduce)]

    def text(self) -> str:
        outer = numel(v.size for v in self.outer)
        vectors = self.size // self.width if self.width > 1 else 0
        unroll = next(
            (u for u in (4, 3, 2) if not is_zero(vectors) and divides(u * self.width, self.size)), 1
        )
        if len(self.exprs) > 40:
            unroll = 1
        block = unroll * max(self.width, 1)
        blocks = vectors // unroll
        tail = self.size - blocks * block
        per_outer = blocks + (0 if is_zero(tail) else 1)
        first = self.kernel.middle[0].size if self.kernel.middle else 1
        tasks = outer * per_outer
        least = f"up(8,max({self.number(tasks)},1))" if type(tasks) is Size else -(-8 // max(tasks, 1))
        chunks, head = self.chunks(first, least, outer * self.size * 8 * len(self.reductions))
        text = self._tasks(outer, blocks, unroll, tail, chunks, first)
        if chunks != "1":
            text = head + self._room(chunks) + text + self._finish(outer, chunks)
        once = CppScope(self.top, [(ONCE, "")])
        for s in self.kernel.final_once:
            self.store(of_kind(s, Store), once)
        return text + "".join(once.lines)

    # -- summing ---------------------------------------------------------------------------------------------
    def _tasks(self, outer: Dim, blocks: Dim, unroll: int, tail: Dim, chunks: str, first: Dim) -> str:
        per_outer = blocks + (0 if is_zero(tail) else 1)
        tasks = outer * per_outer
        every, columns = self.number(per_outer), self.number(self.size)
        place = CppScope(self.top, [(v, self.vars[v]) for v in self.outer])
        parts = []
        if not is_zero(blocks):
            vector = self._block(place, unroll, self.width, chunks, f"block*{unroll * self.width}")
            parts.append(vector if is_zero(tail) else f"if(block<{self.number(blocks)}){{{vector}}}")
        if not is_zero(tail):
            name = self.vars[self.lane] if self.lane else "col"
            scalar = self._block(place, 1, 1, chunks, name)
            start = self.number(self.size - tail)
            text = loop(name, columns, scalar, start=start) if self.lane else scalar
            if self.lane and self.width > TAIL and type(self.size) is Size:
                self.body.widths.add(TAIL)
                narrow = self._block(place, 1, TAIL, chunks, name)
                text = f"i64 {name}={start};{loop(name, columns, narrow, start=None, step=TAIL)}\n"
                text += loop(name, columns, scalar, start=None)
            parts.append(text if is_zero(blocks) else f"else{{{text}}}")
        head = f"const i64 block=task%{every};" + (
            f"const i64 chunk=task/{self.number(tasks)};" if chunks != "1" else ""
        )
        if self.outer:
            head += f"const i64 flat=task/{every}%{self.number(outer)};" + self.decode(
                "flat", self.outer, self.vars
            )
        if chunks != "1":
            rows = self.number(first)
            head += f"const i64 from=chunk*{rows}/{chunks},to=(chunk+1)*{rows}/{chunks};"
        inside = head + "".join(place.lines) + "".join(parts)
        number = tasks * int(chunks) if chunks.isdigit() else 2
        return self.over("task", number, times(chunks, self.number(tasks)), inside) + "\n"

    def _block(self, place: CppScope, unroll: int, width: int, chunks: str, start: str) -> str:
        """One block of columns: accumulators, the loops over the rows, then the results."""
        lane = self.lane
        column = CppScope(place)
        lines = []
        strips = Strips([(v, v.size) for v in self.kernel.middle])
        for s in self.reductions:
            t = ctype(s.expr.dtype, width)
            for name in (f"a{s.id}_{u}" for u in range(unroll)):
                kept = strips.declare(t, name) if loses(s) else ""
                lines.append(f"{t} {name}=bc<{t}>({reduce_start(s.kind, s.expr.dtype, width)});{kept}")
        names = [f"{self.vars[lane]}_{u}" if width > 1 else start for u in range(unroll)] if lane else [""]
        if width > 1:
            lines += [f"const i64 {n}={start}+{u * width};" for u, n in enumerate(names)]
        bound = [[(lane, n)] if lane else [] for n in names]

        def rows(loops: tuple[Var, ...], parent: CppScope) -> None:
            if loops:
                v, name = loops[0], self.vars[loops[0]]
                scope = CppScope(parent, [(v, name)])
                rows(loops[1:], scope)
                limits = (
                    ("from", "to")
                    if chunks != "1" and v is self.kernel.middle[0]
                    else ("0", self.number(v.size))
                )
                body = strips.loop(v, name, 1, limits[1], "".join(scope.lines))
                parent.lines.append(f"{{i64 {name}={limits[0]};{body}}}")
                return
            for u, pairs in enumerate(bound):
                scope = CppScope(parent, pairs, width, lane if width > 1 else None)
                for s in self.kernel.phases[0].inner:
                    if isinstance(s, Store):
                        self.store(s, scope)
                    else:
                        reduction = of_kind(s, Reduce)
                        self.accumulate(reduction, f"a{reduction.id}_{u}", scope)
                parent.lines.append("{" + "".join(scope.lines) + "}")

        rows(self.kernel.middle, column)
        lines += [*column.lines, strips.end()]
        for u, pairs in enumerate(bound):
            end = CppScope(place, [*pairs, (FINAL, "")], width, lane if width > 1 else None)
            if chunks != "1":
                at = self.body.index(self._flat(), end)
                lines += [
                    f"st<{kept_type(s.expr.dtype, width)}>(acc{s.id}+chunk*{self._kept()}+{at},a{s.id}_{u});"
                    for s in self.reductions
                ]
                continue
            for s in self.reductions:
                self.complete(s, end, f"a{s.id}_{u}", width)
            for last in self.kernel.final:
                self.store(of_kind(last, Store), end)
            lines.append("{" + "".join(end.lines) + "}")
        return "".join(lines)

    # -- chunks ----------------------------------------------------------------------------------------------
    def _flat(self) -> Index:
        loops = [*self.outer, *([self.lane] if self.lane else [])]
        return row_major(loops)

    def _kept(self) -> str:
        return self.number(numel(v.size for v in self.outer) * self.size)

    def _room(self, chunks: str) -> str:
        text, offset = "", "0"
        for s in self.reductions:
            t = kept_type(s.expr.dtype, self.width)
            text += f"{t}*const acc{s.id}=({t}*)(room_+{offset});"
            offset = beyond(offset, times(chunks, self._kept()))
        return f"char*room_=(char*)room({offset});{text}"

    def _finish(self, outer: Dim, chunks: str) -> str:
        """Add the chunks' sums in order, then the final statements."""
        place = CppScope(self.top, [(v, self.vars[v]) for v in self.outer])

        def emit(scope: CppScope, copy: int | str) -> None:
            at = self.body.index(self._flat(), scope)
            for s in self.reductions:
                t, acc = ctype(s.expr.dtype, scope.width), f"acc{s.id}"
                other = f"ld<{t}>({acc}+c_*{self._kept()}+{at})"
                self.add_chunks(s, t, f"ld<{t}>({acc}+{at})", other, chunks, scope, scope.width)
            for last in self.kernel.final:
                self.store(of_kind(last, Store), scope)

        self.nest([self.lane] if self.lane else [], place, emit, extra=[(FINAL, "")])
        decode = self.decode("flat", self.outer, self.vars) if self.outer else ""
        return loop("flat", self.number(outer), [decode, *place.lines]) + "\n"
