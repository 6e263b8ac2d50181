"""The Triton function of one kernel under a plan: how its tiles walk over the two axes.

map      every position on its own; one axis, or two where accesses are contiguous along different variables
rows     tiles of rows `x`; each phase is one pass over `r`, whole in registers or in a loop; `chunks` share a
row across   few programs loop over all rows and put sums across them aside, which another kernel adds up scan
tiles of rows, gone through in order with running results (triton_scan.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..graph.sizes import Dim
from ..lower.index_expr import Var
from ..lower.ir import BOOL, Expr, Kernel, Phase, Reduce, Statement, Store, make, of_kind, roots, walk
from .scopes import title
from .triton_body import NOTHING, Axis, Name, TileBody, TileScope
from .triton_ops import COMPUTE, POINTER, across_tile, combine, mark, reduce_start
from .triton_vectors import Vectors

ROW, FINAL, ONCE = Var("@row", 0), Var("@final", 0), Var("@once", 0)


Form = Literal["map", "rows", "across", "scan"]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How a kernel's loops become programs of a grid.

    second: the axis `r` (None: a map along one). looped: a pass over r is a loop over tiles. chunks: programs
    that share a row (rows) or a tile of columns (across); per_chunk: positions of r, or of x, that each
    takes. vectors: where the tiles of a loop over r start; None: at the row's start. run: neighbours of a row
    that a thread loads together. fold: sums across are taken of each tile of rows at once. stages: loads of a
    loop run ahead of it, by way of shared memory. few: rows, and elements of a thread, so
    that waits for memory take the time.
    """

    form: Form
    x: Axis
    second: Axis | None = None
    looped: bool = False
    chunks: Dim = 1
    per_chunk: Dim = 0
    warps: int = 4
    wide: bool = False
    vectors: Vectors | None = None
    run: int = 1
    fold: bool = False
    stages: int = 0
    few: bool = False

    @property
    def r(self) -> Axis:
        """The second axis, of a plan that has one."""
        assert self.second is not None
        return self.second

    @property
    def columns(self) -> Dim:
        """Tiles of columns, each with programs of its own (across)."""
        return 1 if self.looped else -(-self.r.size // self.r.block)

    @property
    def grid(self) -> Dim:
        """Programs of one launch."""
        across_x = -(-self.x.size // self.x.block)
        if self.form == "across":
            return self.chunks * self.columns
        if self.form == "map" and self.second is not None:
            return across_x * -(-self.r.size // self.r.block)
        return across_x * self.chunks


@dataclass(frozen=True, slots=True)
class LaunchPiece:
    """One launch: a kernel under a plan. partial: reduction → the buffer that takes what each chunk has
    gathered.
    """

    kernel: Kernel
    plan: LaunchPlan
    partial: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class TritonFunction:
    """A function of pointers `p0...` and random streams `s0...`, and how it is launched.

    stages: depth of its software pipeline; 0: Triton's own. scratch: bytes of memory of its own that each
    program needs; the launch's last tensor then is that memory. fallback: the function for pointers that are
    no multiples of 16. numbers: arguments of a launch behind the pointers, where the function says them.
    """

    name: str
    source: str
    signature: tuple[str, ...]
    grid: Dim
    warps: int
    checks: bool = False
    stages: int = 0
    scratch: int = 0
    fallback: TritonFunction | None = None
    numbers: tuple[int, ...] = ()


class TileEmitter:
    """Writes one function."""

    def __init__(self, piece: LaunchPiece) -> None:
        self.kernel, self.plan, self.partial = piece.kernel, piece.plan, piece.partial
        self.pointers = {p[0]: f"p{n}" for n, p in enumerate(piece.kernel.params)}
        self.exprs = list(walk(*roots(*self.kernel.statements())))
        self.accs: dict[int, list[Expr]] = {}
        for e in self.exprs:
            if e.op == "acc":
                self.accs.setdefault(e.args[0], []).append(e)
        self.scans: dict[int, Expr] = {e.args[0]: e for e in self.exprs if e.op == "scan"}
        axes = (self.plan.x,) if self.plan.second is None else (self.plan.x, self.plan.r)
        self.streams = self.kernel.streams()
        self.body = TileBody(self.pointers, self.streams, axes, self.exprs, self.plan.wide, self.plan.vectors)
        self.written: set[str] = set()
        self.tops = {s.top for s in self.kernel.statements() if isinstance(s, Reduce) and s.top is not None}

    def draft(self) -> TritonFunction:
        """The whole function, its name and the numbers between marks to be settled."""
        top = TileScope()
        top.line("pid = tl.program_id(0)" + (".to(tl.int64)" if self.plan.wide else ""))
        self.write(top)
        arguments = [*self.pointers.values(), *(f"s{n}" for n in range(len(self.streams)))]
        name = title(self.kernel)
        text = "\n".join([f"@triton.jit\ndef {name}({', '.join(arguments)}):", *top.lines]) + "\n"
        signature = (
            *(POINTER[memory] for _, memory, _ in self.kernel.params),
            *("i64" for _ in self.streams),
        )
        return TritonFunction(name, text, signature, self.plan.grid, self.plan.warps, self.body.checks)

    # -- forms -----------------------------------------------------------------------------------------------
    def write(self, top: TileScope) -> None:
        """The lines of the function."""
        {"map": self._map, "rows": self._rows, "across": self._across}[self.plan.form](top)

    def _map(self, top: TileScope) -> None:
        plan = self.plan
        if plan.second is None:
            bound, masks = self.body.bind(plan.x, f"pid * {plan.x.block}", top)
        else:
            tiles = -(-plan.r.size // plan.r.block)
            bound, masks = self.body.bind(plan.x, f"(pid // {mark(tiles)}) * {plan.x.block}", top)
            more, more_masks = self.body.bind(plan.r, f"(pid % {mark(tiles)}) * {plan.r.block}", top)
            bound, masks = {**bound, **more}, (*masks, *more_masks)
        scope = self.open(top, bound, masks, 1, FINAL, ONCE, ROW)
        for s in self.kernel.statements():
            self.body.store(of_kind(s, Store), scope, known=True)
        top.lines += scope.lines

    def _rows(self, top: TileScope) -> None:
        """Tiles of rows; with chunks, each program takes a part of its rows and leaves its partial results in
        memory.
        """
        plan = self.plan
        tiles = -(-plan.x.size // plan.x.block)
        at = "pid" if plan.chunks == 1 else f"(pid % {mark(tiles)})"
        if plan.chunks > 1:
            top.line(f"chunk = pid // {mark(tiles)}")
        bound, masks = self.body.bind(plan.x, f"{at} * {plan.x.block}", top)
        row = self.open(top, bound, masks, 1, ROW, FINAL, ONCE)
        self._passes(row)
        if plan.chunks > 1:
            for n, buffer in self.partial.items():
                value = row.values[self._acc(n)]
                mask, _ = self.body.mask(row, frozenset("x"))
                place = f"{self.pointers[buffer]} + (chunk * {mark(plan.x.size)} + x)"
                whole = f"tl.broadcast_to({value.text}, [{plan.x.block}, 1])"
                row.line(f"tl.store({place}, {whole}{', ' + mask if mask else ''})")
        else:
            for s in (*self.kernel.final, *self.kernel.final_once):
                self._statement(s, row)
        top.lines += row.lines

    def _across(self, top: TileScope) -> None:
        """A loop over this program's rows; accumulators over the lanes of r, or one number each."""
        plan = self.plan
        lanes = [s for p in self.kernel.phases for s in p.inner if isinstance(s, Reduce) and s.across]
        numbers = [s for p in self.kernel.phases for s in p.row if isinstance(s, Reduce) and s.across]
        outside, part, column = top, "pid", ""
        if plan.columns > 1:
            part, column = "part", f"(pid % {mark(plan.columns)}) * {plan.r.block}"
            top.line(f"part = pid // {mark(plan.columns)}")
        if not plan.looped:
            bound, masks = self.body.bind(plan.r, column, top)
            outside = self.open(top, bound, masks, 1)
        for s in (*lanes, *numbers):
            shape = [1 if plan.fold and s in lanes else plan.x.block, plan.r.block if s in lanes else 1]
            outside.line(
                f"a{s.id} = tl.full({shape}, {reduce_start(s.kind, s.expr.dtype)}, {COMPUTE[s.expr.dtype]})"
            )
        loop = TileScope(outside, indent=2)
        bound, masks = self.body.bind(plan.x, f"({part} * {mark(plan.per_chunk)} + step)", loop)
        row = self.open(outside, bound, masks, 2, ROW)
        self._passes(row)
        span = f"0, {mark(plan.per_chunk)}, {plan.x.block}"
        outside.line(
            f"for step in tl.range({span}, num_stages={plan.stages}):"
            if plan.stages
            else f"for step in range({span}):"
        )
        outside.lines += [*loop.lines, *row.lines]
        for s in (*lanes, *numbers):
            total = self.body.define(across_tile(s.kind, s.expr.dtype, f"a{s.id}", 0), NOTHING, outside)
            pointer = self.pointers[self.partial[s.id]]
            if s in lanes:
                mask, _ = self.body.mask(outside, frozenset("r"))
                place = f"{pointer} + ({part} * {mark(plan.r.size)} + r)"
                outside.line(f"tl.store({place}, {total.text}{', ' + mask if mask else ''})")
            else:
                outside.line(f"tl.store({pointer} + ({part} + tl.zeros([1, 1], tl.int32)), {total.text})")
        if outside is not top:
            top.lines += outside.lines

    @staticmethod
    def open(
        parent: TileScope, bound: Mapping[Var, Name], masks: tuple[Name, ...], indent: int, *pseudo: Var
    ) -> TileScope:
        """A scope that binds loop variables, and says which accumulators may be read in it."""
        return TileScope(
            parent, {**bound, **{v: Name("", NOTHING) for v in pseudo}}, masks=masks, indent=indent
        )

    # -- passes over a row -----------------------------------------------------------------------------------
    def _passes(self, row: TileScope) -> None:
        """The phases of a tile of rows."""
        plan = self.plan
        inner = row
        if not plan.looped and plan.form == "rows":
            bound, masks = self.body.bind(
                plan.r, f"chunk * {mark(plan.per_chunk)}" if plan.chunks > 1 else "", row
            )
            inner = self.open(row, bound, masks, row.indent)
            inner.lines = row.lines
            self._load_ahead(row, inner)
        for phase in self.kernel.phases:
            if not plan.looped:
                for s in phase.inner:
                    self._statement(s, inner, row)
            elif phase.inner:
                self._loop(phase, row)
            for s in phase.row:
                self._statement(s, row)

    def _load_ahead(self, row: TileScope, inner: TileScope) -> None:
        """Loads of a row's own numbers behind its sums, before these: the program waits for memory once.
        Where rows are few, also loads along a row, as of a norm's weight.
        """
        kernel = self.kernel
        later = [*(s for p in kernel.phases for s in p.row), *kernel.final, *kernel.final_once]
        scope = inner if self.plan.few else row
        if self.plan.few:
            later += [s for p in kernel.phases[1:] for s in p.inner]
        written = {s.buffer for s in kernel.statements() if isinstance(s, Store)}
        exprs = list(walk(*roots(*later)))
        if any(e.op in ("masked", "wrap_index") for e in exprs):
            return
        for e in exprs:
            if e.op == "load" and e.args[0] not in written and e.args[1].is_affine:
                if all(v in scope.bound for v in e.args[1].vars()):
                    self.body.value(e, scope)

    def _loop(self, phase: Phase, row: TileScope) -> None:
        """One pass in tiles of r."""
        if any(e.op == "load" and e.args[0] in self.written for e in walk(*roots(*phase.inner))):
            row.line("tl.debug_barrier()")  # other threads have written what this pass reads
        reductions = [s for s in phase.inner if isinstance(s, Reduce) and not s.across]
        self._accumulators(reductions, row)
        for steps, head, bound, masks in self._stretches(row):
            inner = self.open(row, bound, masks, row.indent + 1)
            for s in phase.inner:
                if s in reductions:
                    self._accumulate(s, inner)
                else:
                    self._statement(s, inner, row)
            row.line(f"for base in tl.range({steps}):")
            row.lines += [*head.lines, *inner.lines]
        for s in sorted(reductions, key=lambda s: s.top is not None):  # maxima before values relative to them
            self._collect(s, f"a{s.id}", f"at{s.id}", row)
        self.written |= {s.buffer for s in phase.inner if isinstance(s, Store)}

    def _stretches(
        self, row: TileScope
    ) -> Iterator[tuple[str, TileScope, Mapping[Var, Name], tuple[Name, ...]]]:
        """The loops that make up a pass: the bounds, and what gives the positions of a tile in each."""
        plan, vectors = self.plan, self.plan.vectors
        head = TileScope(row, indent=row.indent + 1)
        if vectors is None:
            shared = plan.form == "rows" and plan.chunks > 1
            bound, masks = self.body.bind(
                plan.r, f"chunk * {mark(plan.per_chunk)} + base" if shared else "base", head
            )
            yield f"0, {mark(plan.per_chunk if shared else plan.r.size)}, {plan.r.block}", head, bound, masks
            return
        size = int(plan.r.size)
        inside, edge = vectors.steps(size, plan.r.block, int(plan.chunks), int(plan.per_chunk))
        lead = self.body.index(vectors.lead, row)
        row.line(f"lead = tl.full([1, 1], 0, {self.position_type}) + ({lead.text}) % {vectors.unit}")
        head.line(f"r = lead + (base + tl.arange(0, {plan.r.block})[None, :])")
        stages = f", num_stages={plan.stages}" if plan.stages else ""
        yield inside + stages, head, self.body.variables(plan.r, head), ()
        head = TileScope(row, indent=row.indent + 1)
        for line in vectors.edge(size, plan.r.block):
            head.line(line)
        yield edge, head, self.body.variables(plan.r, head), (Name("r_in", frozenset("r")),)

    def _accumulators(self, reductions: Sequence[Reduce], row: TileScope) -> None:
        """Neutral elements before a loop: a lane for each place of a tile, or for each thread."""
        lanes, x_block = self.plan.r.block, self.plan.x.block
        for s in reductions:
            in_runs = any(s.id in (e.id, e.top) for e in reductions if e.top is not None and self.in_runs)
            tile = f"[{x_block}, {32 * self.plan.warps if in_runs else lanes}]"
            dtype = "tl.int32" if s.position is not None and s.expr.dtype is BOOL else COMPUTE[s.expr.dtype]
            row.line(f"a{s.id} = tl.full({tile}, {self._start(s)}, {dtype})")
            if s.position is not None:
                row.line(f"at{s.id} = tl.full({tile}, {self._last_position}, {self.position_type})")

    @property
    def in_runs(self) -> bool:
        """Whether sums of exponentials take many elements of a thread at once."""
        return self.plan.x.block == 1 and self.plan.r.block >= 32 * self.plan.warps * self.plan.run

    def _statement(self, s: Statement, scope: TileScope, row: TileScope | None = None) -> None:
        if isinstance(s, Store):
            self.body.store(s, scope, known=not self.plan.looped)
            return
        s = of_kind(s, Reduce)
        if s.across:
            value = self._masked_tile(s, scope, lanes=row is not None)
            if self.plan.fold and row is not None:
                value = across_tile(s.kind, s.expr.dtype, value, 0)
            scope.line(f"a{s.id} = {combine(s.kind, s.expr.dtype, f'a{s.id}', value)}")
        else:
            value = self._masked_tile(s, scope, lanes=True)
            assert row is not None  # a value of each row is known to the row
            if s.position is None:
                self._complete(s, across_tile(s.kind, s.expr.dtype, value, 1), row)
                return
            tile = self.body.define(value, NOTHING, scope)
            positions = self.body.full_tile(self.body.integer(s.position, self.position_type, scope))
            self._collect(s, tile.text, positions, row, masked=scope)

    # -- reductions ------------------------------------------------------------------------------------------
    @property
    def position_type(self) -> str:
        return "tl.int64" if self.plan.wide else "tl.int32"

    @property
    def _last_position(self) -> int:
        return (1 << 63 if self.plan.wide else 1 << 31) - 1

    def _acc(self, number: int) -> Expr:
        """Stands for a reduction's result where nothing reads it in this kernel."""
        found = self.accs.get(number)
        return found[0] if found else make("acc", (number, "row", None), BOOL)

    def _start(self, s: Reduce) -> str:
        """The neutral element; positions of booleans compare as integers."""
        if s.position is not None and s.expr.dtype is BOOL:
            return "-1" if s.kind == "argmax" else "2"
        return reduce_start(s.kind, s.expr.dtype)

    def _masked_tile(self, s: Reduce, scope: TileScope, lanes: bool) -> str:
        """The value as a whole tile, neutral where the tile is outside of the reduced range."""
        value = self.body.value(s.expr, scope)
        if s.position is not None and s.expr.dtype is BOOL:
            value = Name(f"{value.text}.to(tl.int32)", value.axes)
        text = (
            self.body.full_tile(value)
            if lanes
            else f"tl.broadcast_to({value.text}, [{self.plan.x.block}, 1])"
        )
        reduced = {"x"} if s.across else {"r"}
        mask = " & ".join(m.text for m in scope.masks if m.text.endswith("_in") and m.axes <= reduced)
        neutral = reduce_start("max", s.expr.dtype) if s.top is not None else self._start(s)
        return f"tl.where({mask}, {text}, {neutral})" if mask else text

    def _accumulate(self, s: Reduce, scope: TileScope) -> None:
        """One tile of a loop into the accumulator."""
        best, at = f"a{s.id}", f"at{s.id}"
        if s.id in self.tops:  # the sums of exponentials before it know the maximum already
            scope.line(f"{best} = top{s.id}")
            return
        value = self._masked_tile(s, scope, lanes=True)
        if s.top is not None:  # stands before its maximum, which still is that of the tiles so far
            given = f"a{s.top}, {best}, {value}"
            call = f"exp_sums({given}, {self.plan.run})" if self.in_runs else f"exp_sum({given})"
            scope.line(f"top{s.top}, {best} = {call}")
            return
        if s.position is None:
            scope.line(f"{best} = {combine(s.kind, s.expr.dtype, best, value)}")
            return
        tile = self.body.define(value, NOTHING, scope).text
        here = self.body.full_tile(self.body.integer(s.position, self.position_type, scope))
        mask, _ = self.body.mask(scope, frozenset("r"))
        if mask:
            here = self.body.define(f"tl.where({mask}, {here}, {self._last_position})", NOTHING, scope).text
        sign = ">" if s.kind == "argmax" else "<"
        both_nan = f"(({tile} != {tile}) & ({best} != {best}))"
        tie = f"(({tile} == {best}) | {both_nan}) & ({here} < {at})"
        better = self.body.define(
            f"({tile} {sign} {best}) | (({tile} != {tile}) & ({best} == {best})) | ({tie})", NOTHING, scope
        )
        scope.line(f"{best} = tl.where({better.text}, {tile}, {best})")
        scope.line(f"{at} = tl.where({better.text}, {here}, {at})")

    def _collect(
        self, s: Reduce, tile: str, positions: str, row: TileScope, masked: TileScope | None = None
    ) -> None:
        """One value a row from a tile of accumulators."""
        if s.top is not None:
            tile = f"{tile} * tl.exp(a{s.top} - {row.values[self._acc(s.top)].text})"
            self._complete(s, across_tile("sum", s.expr.dtype, tile, 1), row)
            return
        if s.position is None:
            self._complete(s, across_tile(s.kind, s.expr.dtype, tile, 1), row)
            return
        kind = s.kind[3:]
        is_float = s.expr.dtype.is_floating_point
        over = f"tl.reduce({tile}, 1, {kind}imum)" if is_float else f"tl.{kind}({tile}, 1)"
        best = self.body.define(f"tl.expand_dims({over}, 1)", frozenset("x"), row).text
        hit = f"({tile} == {best}) | (({tile} != {tile}) & ({best} != {best}))"
        mask = self.body.mask(masked, frozenset("r"))[0] if masked is not None else ""
        found = f"tl.where({f'({hit}) & {mask}' if mask else hit}, {positions}, {self._last_position})"
        self._complete(s, f"tl.expand_dims(tl.min({found}, 1), 1).to(tl.int64)", row)

    def _complete(self, s: Reduce, text: str, row: TileScope) -> None:
        """The reduction's result is known to the row from now on."""
        name = self.body.define(text, frozenset("x"), row)
        row.values[self._acc(s.id)] = name
        for e in self.accs.get(s.id, ()):
            row.values[e] = name
