"""The C++ function of a "rows" kernel whose rows are side by side in memory: a softmax over channels, argmax
down the columns. A vector holds one element of each of several rows, and no lane is combined with another.

for (block of rows) { phase 0: for (elements) acc[u] += ...; phase 1: ...; row stores }
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.sizes import divides
from ..graph.spec import numel
from ..lower.index_expr import Index, Var, flatten, is_one, row_major
from ..lower.ir import (
    I64,
    ROW as AFTER_ROW,
    Expr,
    Kernel,
    Phase,
    Reduce,
    Scratch,
    Statement,
    Store,
    changed,
    make,
    of_kind,
    rewrite,
    roots,
    walk,
)
from ..runtime.cpp_text import loop
from .cpp_body import CppScope
from .cpp_kernel import ROW, Emitter, machine_width, pick_width
from .cpp_ops import ctype, reduce_start
from .cpp_positions import Positions, without_tracked
from .cpp_sums import Strips, loses

MOST_UNROLLED = 24  # expressions of a kernel of which several blocks of rows go side by side
TASKS = 8  # blocks of rows, for threads, that are worth more than blocks side by side
ROOM = 1 << 18  # bytes of values that are kept between passes, on the stack
_CLOSE = (1, 2)  # steps of loads without lanes of their own
_NO_VECTORS = ("rand", "masked", "wrap_index")


def vertical_rows(kernel: Kernel) -> Var | None:
    """The loop over rows whose elements follow each other in memory, where most accesses of a kernel with
    reductions do; None where vectors go along the rows.
    """
    statements = list(kernel.statements())
    reductions = [s for s in statements if isinstance(s, Reduce)]
    if not kernel.inner or kernel.final or kernel.final_once or kernel.symbols:
        return None
    if not reductions or any(s.across for s in reductions):
        return None
    stores = [s for s in statements if isinstance(s, Store)]
    exprs = walk(*roots(*statements))
    if any(e.op in _NO_VECTORS for e in exprs) or any(s.scatters or s.add for s in stores):
        return None
    along = kernel.inner[-1]
    loads = [e for e in exprs if e.op == "load"]
    places = [e.args[1] for e in loads] + [s.index for s in stores]
    inner = [e.args[1] for e in loads if along in e.vars] or [e.args[1] for e in loads]  # of a repeated value
    for v in kernel.outer:
        beside = sum(place.coefficient(v) in _CLOSE for place in inner)
        behind = sum(place.coefficient(along) in _CLOSE for place in inner)
        even = all(place.coefficient(v) is not None for place in places)
        if even and beside > behind and type(v.size) is int and v.size >= machine_width():
            return v
    return None


def vertical_emitter(kernel: Kernel) -> VerticalEmitter | None:
    """The emitter of such a kernel, else None."""
    rows = vertical_rows(kernel)
    if rows is None:
        return None
    exprs = [e for e in walk(*roots(*kernel.statements())) if e.op != "acc"]
    width, size = pick_width(exprs, rows), int(rows.size)
    kept = sum(s.expr.dtype.itemsize for s in kernel.statements() if isinstance(s, Scratch))
    kept *= int(numel(v.size for v in kernel.inner)) * width
    unroll = 4 if len(exprs) <= MOST_UNROLLED and size >= 4 * width else 1
    others = int(numel(v.size for v in kernel.outer)) // size
    while unroll > 1 and (kept * unroll > ROOM or others * size < TASKS * unroll * width):
        unroll //= 2
    if width == 1 or kept > 2 * ROOM:
        return None
    return VerticalEmitter(_in_lanes(kernel, rows, unroll * width), rows, width, unroll)


class VerticalEmitter(Emitter):
    """The "rows" template for vectors across rows; unroll: vectors side by side."""

    def __init__(self, kernel: Kernel, rows: Var, width: int, unroll: int) -> None:
        super().__init__(kernel)
        self.rows, self.width, self.unroll = rows, width, unroll
        self.count = int(numel(v.size for v in kernel.inner))
        self.body.widths.add(width)

    def text(self) -> str:
        rows, span = self.rows, self.unroll * self.width
        name, size = self.vars[rows], int(rows.size)
        others = [v for v in self.kernel.outer if v is not rows]
        place = CppScope(self.top, [(v, self.vars[v]) for v in others])
        blocks = size // span
        block = self._block(place, [f"{name}_{u}" for u in range(self.unroll)], self.width)
        starts = "".join(f"const i64 {name}_{u}=block*{span}+{u * self.width};" for u in range(self.unroll))
        parts = f"{{{starts}{block}}}"
        if size % span:
            rest = loop(name, str(size), self._block(place, [name], self.width), start=None, step=self.width)
            single = loop(name, str(size), self._block(place, [name], 1), start=None)
            parts = f"if(block<{blocks}){parts}else{{i64 {name}={blocks * span};{rest}{single}}}"
        every = blocks + (size % span > 0)
        tasks = int(numel(v.size for v in others)) * every
        head = f"const i64 block=task%{every};"
        head += self.decode(f"(task/{every})", others, self.vars) if others else ""
        return self.over("task", tasks, str(tasks), f"{head}{''.join(place.lines)}{parts}")

    def _block(self, place: CppScope, names: Sequence[str], width: int) -> str:
        """All phases of one vector of rows, or of several side by side."""
        lines: list[str] = []
        rows = [self._scope(place, [(self.rows, name), (ROW, "")], width, lines) for name in names]
        for phase in self.kernel.phases:
            for s in phase.inner:
                if isinstance(s, Scratch):
                    t = ctype(s.expr.dtype, 1)
                    lines.append(
                        f"{t} s{s.id}_[{self.count * self.unroll * self.width}] __attribute__((aligned(64)));"
                    )
                    self.body.scratch[s.id] = f"s{s.id}_-{names[0]}"
            if phase.inner:
                self._pass(phase, rows, lines, width)
            for s in phase.row:
                for row in rows:
                    self.store(of_kind(s, Store), row)
        return "".join(lines)

    def _scope(
        self, parent: CppScope, bound: Sequence[tuple[Var, str]], width: int, lines: list[str]
    ) -> CppScope:
        scope = CppScope(parent, bound, width, self.rows if width > 1 else None)
        scope.lines = lines  # blocks side by side share their loops
        return scope

    def _pass(self, phase: Phase, rows: Sequence[CppScope], lines: list[str], width: int) -> None:
        self.strips = Strips([(v, v.size) for v in self.kernel.inner])
        phase, tracked = without_tracked(phase)
        reductions = [s for s in phase.inner if isinstance(s, Reduce)]
        for s in reductions:
            for u in range(len(rows)):
                lines.append(self._accumulator(s, f"a{s.id}_{u}", width))
        lines.append(self._loops(self.kernel.inner, rows, phase, width))
        lines.append(self.strips.end())
        self.strips = Strips(())
        for s in reductions:
            for u, row in enumerate(rows):
                result = f"a{s.id}_{u}"
                if s.position is not None:
                    t, result = ctype(I64, width), self.body.fresh()
                    lines.append(f"const {t} {result}=cvt<{t}>(a{s.id}_{u}at);")
                self.complete(s, row, result, width)
        for s, holder in tracked:
            for u, row in enumerate(rows):
                self.complete(s, row, f"a{holder}_{u}", width)

    def _accumulator(self, s: Reduce, name: str, width: int) -> str:
        if s.position is not None:
            return Positions(s, self.kernel.inner, self.body).declare(name, width)
        t = ctype(s.expr.dtype, width)
        kept = self.strips.declare(t, name) if loses(s) else ""
        return f"{t} {name}=bc<{t}>({reduce_start(s.kind, s.expr.dtype)});{kept}"

    def _loops(self, loops: Sequence[Var], parents: Sequence[CppScope], phase: Phase, width: int) -> str:
        v, name, lines = loops[0], self.vars[loops[0]], list[str]()
        scopes = [self._scope(parent, [(v, name)], width, lines) for parent in parents]
        if len(loops) > 1:
            lines.append(self._loops(loops[1:], scopes, phase, width))
        elif width > 1 and divides(width, v.size) and all(self._runs_along(s, v) for s in phase.inner):
            squares = "".join(
                self._square(of_kind(s, Store), v, p, width) for p in parents for s in phase.inner
            )
            return loop(name, self.number(v.size), squares, step=width)
        else:
            for u, scope in enumerate(scopes):
                for s in phase.inner:
                    self._statement(s, scope, f"a{s.id}_{u}" if isinstance(s, Reduce) else "")
        return f"{{i64 {name}=0;{self.strips.loop(v, name, 1, self.number(v.size), ''.join(lines))}}}"

    def _runs_along(self, s: Statement, v: Var) -> bool:
        """Whether a statement stores rows whose own elements follow each other."""
        return isinstance(s, Store) and is_one(s.index.coefficient(v) or 0)

    def _square(self, s: Store, v: Var, row: CppScope, width: int) -> str:
        """A store of as many elements of each row as a vector has rows: transposed in registers."""
        name, first, t = self.vars[v], row.own[self.rows], ctype(s.expr.dtype, width)
        lines: list[str] = []
        across = self._scope(row, [(v, f"({name}+j_)")], width, lines)
        value = self.body.operand(s.expr, across, width)
        each, computed = f"for(i64 j_=0;j_<{width};j_++)", "".join(lines)
        taken = f"{t} t_[{width}];{each}{{{computed}t_[j_]={value};}}transpose_(t_);"
        along = CppScope(row, [(self.rows, f"({first}+j_)"), (v, name)], width, v)
        along.values[s.expr] = "w_", width
        if s.expr.op == "round_to":  # a store may round by itself
            along.values[s.expr.args[0]] = "w_", width
        self.store(s, along)
        return f"{{{taken}{each}{{const {t} w_=t_[j_];{''.join(along.lines)}}}}}"

    def _statement(self, s: Statement, scope: CppScope, total: str) -> None:
        if isinstance(s, Store):
            self.store(s, scope)
        elif isinstance(s, Scratch):
            value = self.body.rounded(s.expr, scope, scope.width)
            place = _lane_of(row_major(self.kernel.inner), self.rows, self.unroll * self.width)
            at = f"{self.body.scratch[s.id]}+{self.body.index(place, scope)}"
            scope.lines.append(f"st<{ctype(s.expr.dtype, 1)}>({at},{value});")
        elif of_kind(s, Reduce).position is not None:
            scope.lines.append(
                Positions(of_kind(s, Reduce), self.kernel.inner, self.body).track(total, scope)
            )
        else:
            self.accumulate(of_kind(s, Reduce), total, scope)


def _lane_of(position: Index, rows: Var, span: int) -> Index:
    """Where a row of the block keeps its value of a position; the memory begins at the block's first row."""
    return flatten([position, Index.of(rows)], [span, 1])


def _in_lanes(kernel: Kernel, rows: Var, span: int) -> Kernel:
    """The kernel with results of rows, and values kept between passes, that differ from row to row."""
    memo: dict[Expr, Expr] = {}

    def leaf(e: Expr) -> Expr | None:
        if e.op == "acc" and e.args[1] == AFTER_ROW:
            return make("acc", (*e.args[:2], Index.of(rows)), e.dtype)
        if e.op == "scratch":
            return make("scratch", (e.args[0], _lane_of(e.args[1], rows, span)), e.dtype)
        return None

    return kernel.changed(lambda ss: [changed(s, lambda e: rewrite(e, leaf, memo=memo)) for s in ss])
