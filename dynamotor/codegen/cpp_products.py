"""The C++ function of a "rows" kernel that sums along rows of bytes, over values that all rows share:
quantised weights times a vector. Converting takes longer than memory does, so several rows go side by side: a
shared value is loaded once for all. Wider numbers go row by row (`cpp_kernel.py`), in the memory's order.

for (block of rows) { for (elements) { acc[0] += w[o] * x; acc[1] += w[o+1] * x; ... } row stores }
"""

from __future__ import annotations

from collections.abc import Sequence

from ..lower.index_expr import Index, Var, is_one, is_zero
from ..lower.ir import Expr, Kernel, Reduce, Store, of_kind
from ..runtime.cpp_text import loop
from .cpp_body import CppScope
from .cpp_kernel import ROW, STREAMED, Emitter, all_exprs, machine_width
from .cpp_ops import ACROSS_LANES, COMBINE, ctype, reduce_start
from .cpp_sums import Strips, loses

MOST = 8  # rows side by side
LEAST_BLOCKS = 16  # of rows, for threads
LARGEST = 24  # expressions
LINE = 64  # bytes that memory delivers at once
_NO_STREAMS = ("rand", "masked", "scratch", "scan", "acc")


def rows_together(kernel: Kernel) -> int:
    """How many rows go side by side; 1 where the kernel is no such sum, or its matrix stays in a cache."""
    if len(kernel.phases) != 1 or kernel.final or kernel.final_once or kernel.symbols:
        return 1
    if len(kernel.outer) != 1 or len(kernel.inner) != 1:
        return 1
    row, lane = kernel.outer[0], kernel.inner[0]
    if row.size * lane.size < STREAMED or lane.size < 4 * machine_width():
        return 1
    sums = [s for s in kernel.phases[0].inner if isinstance(s, Reduce)]
    if len(sums) < len(kernel.phases[0].inner) or any(s.kind != "sum" or s.across for s in sums):
        return 1
    if not all(isinstance(s, Store) and not s.scatters for s in kernel.phases[0].row):
        return 1
    exprs = all_exprs(sums)
    if len(exprs) > LARGEST or any(e.op in _NO_STREAMS or e.dtype.itemsize > 4 for e in exprs):
        return 1
    streams = _streams(exprs, row, lane)
    if not streams or max(e.args[2].itemsize for e in streams) > 1:
        return 1
    places = [e.args[1] for e in exprs if e.op == "load"]
    shared = any(is_zero(p.coefficient(row)) and is_one(p.coefficient(lane)) for p in places)
    count = MOST // len(sums)
    while count > 1 and row.size // count < LEAST_BLOCKS:
        count //= 2
    return count if shared else 1


def _streams(exprs: Sequence[Expr], row: Var, lane: Var) -> list[Expr]:
    """The loads of matrices: each row is read once, from its start to its end."""
    steps = [(e, e.args[1].coefficient(row), e.args[1].coefficient(lane)) for e in exprs if e.op == "load"]
    return [e for e, across, along in steps if is_one(along) and across is not None and not is_zero(across)]


class ProductsEmitter(Emitter):
    """Rows side by side, in accumulators of their own."""

    def __init__(self, kernel: Kernel, together: int) -> None:
        super().__init__(kernel)
        self.together = together
        self.body.widths.add(self.width)
        self.sums = [of_kind(s, Reduce) for s in kernel.phases[0].inner]
        # Sums wait for one another, so a row has two accumulators, where there are registers for them.
        self.unroll = 2 if machine_width() >= 16 else 1

    def text(self) -> str:
        """Blocks of rows, then the rows that are left."""
        count = int(self.kernel.outer[0].size)
        blocks = count // self.together
        rows = self._rows(self.together, f"task*{self.together}")
        text = self.over("task", blocks, str(blocks), rows)
        if count % self.together:
            text += loop("row", str(count), self._rows(1, "row"), start=str(blocks * self.together))
        return text

    def _rows(self, count: int, first: str) -> str:
        """The loop over the elements of `count` rows, and their results."""
        v, (lane,) = self.kernel.outer[0], self.kernel.inner
        names = [f"{self.vars[v]}_{r}" for r in range(count)]
        group = CppScope(self.top)
        group.lines += [f"const i64 {name}={first}+{r};" for r, name in enumerate(names)]
        self.strips = Strips([(lane, -(-lane.size // (self.unroll * self.width)))])
        for r in range(count):
            self._declare(r, group)

        streams = _streams(all_exprs(self.sums), v, lane) if count == self.together else ()
        ahead = [e for e in streams if e.args[1].coefficient(v) == lane.size]  # no gaps between rows

        def emit(scope: CppScope, copy: int | str) -> None:
            if scope.width > 1 and copy == 0:
                self._fetch_next(ahead, CppScope(scope, [(v, names[0])]), scope)
            for r, name in enumerate(names):
                one = CppScope(scope, [(v, name)], scope.width, scope.vector)
                for s in self.sums:
                    self.accumulate(s, f"a{s.id}_{r}_{copy if scope.width > 1 else 's'}", one)
                scope.lines.append("{" + "".join(one.lines) + "}")

        self.nest((lane,), group, emit, unroll=self.unroll)
        group.lines.append(self.strips.end())
        self.strips = Strips(())
        for r, name in enumerate(names):
            self._finish(r, CppScope(group, [(v, name), (ROW, "")]), group)
        return "".join(group.lines)

    def _fetch_next(self, loads: Sequence[Expr], first: CppScope, scope: CppScope) -> None:
        """Fetch as much of the next block as this turn of the loop reads, in the memory's order, into
        the second cache. first: where the row is the block's first.
        """
        lane, turn = self.kernel.inner[0], self.unroll * self.width * self.together
        for e in loads:
            at = e.args[1].subst({lane: Index.of(lane) * self.together}) + lane.size * self.together
            place = f"{self.body.params[e.args[0]]}+{self.body.index(at, first)}"
            scope.lines += [f"__builtin_prefetch({place}+{n},0,2);" for n in range(0, turn, LINE)]

    def _accumulators(self, s: Reduce, r: int) -> Sequence[tuple[str, int]]:
        """The names of a row's accumulators and their lanes, the one without lanes first."""
        return [(f"a{s.id}_{r}_s", 1), *((f"a{s.id}_{r}_{u}", self.width) for u in range(self.unroll))]

    def _declare(self, r: int, group: CppScope) -> None:
        for s in self.sums:
            for name, width in self._accumulators(s, r):
                t, start = ctype(s.expr.dtype, width), reduce_start(s.kind, s.expr.dtype)
                kept = self.strips.declare(t, name) if loses(s) else ""
                group.lines.append(f"{t} {name}=bc<{t}>({start});{kept}")

    def _finish(self, r: int, row: CppScope, group: CppScope) -> None:
        """One row's sums and stores."""
        for s in self.sums:
            (total, _), (lanes, _), *more = self._accumulators(s, r)
            for other, _ in more:
                lanes = f"({COMBINE[s.kind].format(lanes, other)})"
            total = COMBINE[s.kind].format(total, f"{ACROSS_LANES[s.kind]}({lanes})")
            name = self.body.fresh()
            row.lines.append(f"const {ctype(s.expr.dtype, 1)} {name}={total};")
            self.complete(s, row, name, 1)
        for store in self.kernel.phases[0].row:
            self.store(of_kind(store, Store), row)
        group.lines.append("{" + "".join(row.lines) + "}")


def products_emitter(kernel: Kernel) -> ProductsEmitter | None:
    """The emitter of such a kernel; None for others."""
    together = rows_together(kernel)
    return ProductsEmitter(kernel, together) if together > 1 else None
