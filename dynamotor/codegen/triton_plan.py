"""How a kernel runs on a GPU: its tile sizes, and into which launches it is cut so that all multiprocessors
have work.

>>> # column sums: partial sums, then their sums
>>> [piece.plan.grid for piece in plan_kernel(kernel, new_buffer)]
[264, 12]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..graph.sizes import Dim, Size, divides, equal, hint, is_symbolic
from ..graph.spec import TensorSpec, contiguous_stride, numel
from ..lower.index_expr import Index, Var, flatten, is_one, is_zero, row_major
from ..lower.ir import (
    BOOL,
    COLS,
    I64,
    ROW,
    ROWS,
    SCAN,
    Expr,
    Kernel,
    Phase,
    Reduce,
    ReduceKind,
    Scratch,
    Statement,
    Store,
    compare,
    const,
    load,
    loads_of,
    make,
    of_kind,
    op,
    rebuild,
    rewrite,
    roots,
    select,
    walk,
)
from ..lower.lowering import decline_if
from ..lower.schedule import merge_loops
from .triton_body import Axis
from .triton_kernel import Form, LaunchPiece, LaunchPlan
from .triton_vectors import vectors_of


@dataclass(frozen=True, slots=True)
class GpuTuning:
    """Sizes of tiles, in elements where nothing else is said, and how many programs share a GPU."""

    programs: int = 264  # two for each multiprocessor
    whole_row: int = 16384  # of a row that is kept in registers
    loop_tile: int = 4096  # of a tile of a loop over a longer row
    long_tile: int = 8192  # and of one that would not fit into registers
    loop_warp: int = 512  # of such a tile for each warp
    long_row: int = 4096  # from which on a map over many rows takes a program a row
    thread: int = 16  # of each thread in a tile of whole rows that also are summed across
    # Warps that share a row while each thread has few enough elements: two programs a multiprocessor overlap.
    row_warps: int = 8
    # Of the pipeline of a loop over such tiles: with two, loads would not run while the loop computes.
    stages: int = 3
    shared: int = 200_000  # bytes of shared memory of a multiprocessor that they may take
    columns: int = 128  # columns of a tile that is summed across alone
    one_warp: int = 256  # lanes up to which a row without vectors is left to one warp
    crossed: tuple[int, int, int] = (32, 64, 4)  # rows, columns and warps of a tile that some access crosses
    crossed_bytes: tuple[int, int, int] = (64, 64, 8)  # of one whose bytes are stored across: whole sectors
    few: int = 132  # rows up to which each has a multiprocessor for itself
    few_warp: int = 128  # elements of such a row for each warp: the wait for memory takes its time
    bytes: int = 8192  # that a program sums of rows in bytes: to start one takes as long as to read some


WIDE_FROM = (1 << 31) - (1 << 24)  # positions from here on need 64 bits

NewBuffer = Callable[[TensorSpec], str]
DEFAULT = GpuTuning()


def _count(loops: Iterable[Var]) -> Dim:
    """Iterations of a nest of loops."""
    return numel(v.size for v in loops)


def power_of_two(n: Dim) -> int:
    """The smallest power of two that is not smaller. Of a size that differs between calls: asked for."""
    found = 1 << max(hint(n) - 1, 0).bit_length()
    if type(n) is Size:
        n.env.ask(">=", found - n)
        if found > 1:
            n.env.ask(">=", n - found // 2 - 1)
    return found


def _capped(n: Dim, most: int) -> int:
    """The smaller of `most`, a power of two, and the smallest one that is not below n; one question of n as
    a rule.
    """
    return most if n > most // 2 else power_of_two(n)


def _rows_of_tile(rows: Dim, most: int, programs: int) -> int:
    """Rows of a tile, at most so many, so that there is a tile for each program; where rows differ between
    calls, one or the most.
    """
    if type(rows) is Size:
        return most if most > 1 and rows >= most * programs else 1
    while most > 1 and rows < most * programs:
        most //= 2
    return most


def is_map(kernel: Kernel) -> bool:
    """Whether each element is computed on its own."""
    return (
        kernel.template != SCAN
        and len(kernel.phases) == 1
        and not (kernel.phases[0].row or kernel.final or kernel.final_once)
        and not any(isinstance(s, Reduce) for s in kernel.statements())
    )


def _without_scratch(kernel: Kernel) -> Kernel:
    """Kept values spelt out: a row in registers has them still, a loop over a long one computes them
    again.
    """
    kept = {s.id: s.expr for s in kernel.statements() if isinstance(s, Scratch)}
    if not kept:
        return kernel
    memo: dict[Expr, Expr] = {}

    def spell(e: Expr) -> Expr | None:
        return rewrite(kept[e.args[0]], spell, memo=memo) if e.op == "scratch" else None

    return kernel.changed(
        lambda statements: (rebuild(s, spell, memo) for s in statements if not isinstance(s, Scratch))
    )


def _keeps_what_it_overwrites(kernel: Kernel) -> bool:
    """Whether a kept value cannot be computed again, because the kernel writes its operands."""
    written = {s.buffer for s in kernel.statements() if isinstance(s, Store)}
    kept = [s for s in kernel.statements() if isinstance(s, Scratch)]
    return any(e.args[0] in written for s in kept for e in loads_of(s.expr))


# -- facts ---------------------------------------------------------------------------------------------------
def is_wide(kernel: Kernel) -> bool:
    """Whether some position does not fit 32 bits."""
    if numel(v.size for v in (*kernel.outer, *kernel.middle, *kernel.inner)) >= WIDE_FROM:
        return True
    for s in kernel.statements():
        indices = (
            [s.index]
            if isinstance(s, Store)
            else [s.position]
            if isinstance(s, Reduce) and s.position is not None
            else []
        )
        for index in [*indices, *(i for e in walk(*roots(s)) for i in e.indices())]:
            low, high = index.bounds
            if high >= WIDE_FROM or low <= -WIDE_FROM:
                return True
    return False


def contiguous_along(kernel: Kernel, v: Var) -> int:
    """How many wide accesses step by one along a variable."""
    return sum(is_one(index.coefficient(v)) for index in accesses(kernel))


def accesses(kernel: Kernel) -> Iterator[Index]:
    """Stores and loads of each statement."""
    for s in kernel.statements():
        if isinstance(s, Store):
            yield s.index
        yield from (e.args[1] for e in walk(*roots(s)) if e.op == "load")


def _piece(
    kernel: Kernel, plan: LaunchPlan, partial: Mapping[int, tuple[str, torch.dtype]] | None = None
) -> LaunchPiece:
    partial = partial or {}
    return LaunchPiece(
        kernel.with_params(partial.values()), plan, {n: name for n, (name, _) in partial.items()}
    )


def _reads_rows(kernel: Kernel, rows: Sequence[Var], last: Var) -> bool:
    """Whether some value belongs to a row as a whole, so that a program a row reads it once."""
    indices = [e.args[1] for e in walk(*roots(*kernel.statements())) if e.op == "load"]
    return any(
        is_zero(i.coefficient(last)) and any(_moves(i, v) for v in rows) for i in indices if i.is_affine
    )


def _only_along(kernel: Kernel, v: Var, last: Var) -> bool:
    """Whether some access steps by one along `v` and by more along the last variable."""
    for index in accesses(kernel):
        along = index.coefficient(last)
        if is_one(index.coefficient(v)) and not is_zero(along) and not is_one(along):
            return True
    return False


def _stores_bytes_along(kernel: Kernel, v: Var) -> bool:
    stores = [s for s in kernel.statements() if isinstance(s, Store)]
    return any(s.memory.itemsize == 1 and is_one(s.index.coefficient(v)) for s in stores)


# -- rewrites ----------------------------------------------------------------------------------
def with_exp_sums(kernel: Kernel) -> Kernel:
    """A maximum and the sums of exponentials relative to it in one pass over the row, where they were two."""
    phases = list(kernel.phases)
    for n in range(len(phases) - 2, -1, -1):
        first, second = phases[n], phases[n + 1]
        tops = {s.id: s for s in first.inner if isinstance(s, Reduce) and s.kind == "max" and not s.across}
        sums = [
            (s, top)
            for s in second.inner
            if isinstance(s, Reduce) and (top := _relative_to(s, tops)) is not None
        ]
        if not sums or len(sums) < len(second.inner):
            continue
        added = tuple(Reduce(s.id, "exp_sum", tops[top].expr, top=top) for s, top in sums)
        phases[n : n + 2] = [Phase((*added, *first.inner), (*first.row, *second.row))]
    return replace(kernel, phases=tuple(phases))


def _relative_to(s: Statement, tops: Mapping[int, Reduce]) -> int | None:
    """The maximum m in a sum of exp(x - m) over the x that it is the maximum of."""
    if not isinstance(s, Reduce) or s.kind != "sum" or s.across or s.expr.op != "exp":
        return None
    (inside,) = s.expr.args
    if inside.op != "sub" or inside.args[1].op != "acc":
        return None
    top = inside.args[1].args[0]
    return top if top in tops and tops[top].expr is inside.args[0] else None


def _strided(kernel: Kernel, x: Sequence[Var], r: Sequence[Var]) -> bool:
    """Whether memory is contiguous along the rows' last variable rather than along the row; accesses once
    a row do not count.
    """
    if kernel.template == COLS:
        return bool(x) and x[-1].size > 1
    if not x or not r or x[-1].size < 8:
        return False
    inside = replace(kernel, phases=tuple(Phase(p.inner) for p in kernel.phases), final_once=())
    return contiguous_along(inside, x[-1]) > 2 * contiguous_along(inside, r[-1])


def _axes(kernel: Kernel) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    """(the kept values, the range of each program)."""
    if kernel.template == COLS:
        return (*kernel.outer, *kernel.inner), kernel.middle
    return kernel.outer, kernel.inner


def _joined(reductions: Sequence[Reduce], found: Mapping[int, Expr]) -> tuple[Phase, ...]:
    """The chunks' results put together. In a second pass sums of exponentials, each relative to its own
    chunk's maximum, and positions: the first of the chunks that have the extreme.
    """
    plain = tuple(
        Reduce(s.id, s.kind, found[s.id]) for s in reductions if s.top is None and s.position is None
    )
    second = []
    for s in reductions:
        if s.top is not None:
            top = _of_row(s.top, s.expr.dtype)
            second.append(
                Reduce(s.id, "sum", op("mul", found[s.id], op("exp", op("sub", found[s.top], top))))
            )
        elif s.position is not None:
            extreme = _extreme_of(s, reductions)
            assert extreme is not None
            has = _is_same(found[extreme.id], _of_row(extreme.id, s.expr.dtype))
            second.append(Reduce(s.id, "min", select(has, found[s.id], const(torch.iinfo(I64).max, I64))))
    return (Phase(plain), *([Phase(tuple(second))] if second else []))


def _of_row(number: int, dtype: torch.dtype) -> Expr:
    return make("acc", (number, ROW, Index({}, 0)), dtype)


def _is_same(a: Expr, b: Expr) -> Expr:
    """Whether two numbers are equal or both NaN."""
    same = compare("eq", a, b)
    if not a.dtype.is_floating_point:
        return same
    return op("or", same, op("and", compare("ne", a, a), compare("ne", b, b)))


def _extreme_of(position: Reduce, among: Sequence[Reduce]) -> Reduce | None:
    """The reduction that gives the value at a position."""
    same = (s for s in among if s.kind == position.kind[3:] and s.expr is position.expr and not s.across)
    return next(same, None)


def _with_extremes(statements: Sequence[Statement]) -> list[Statement]:
    """Statements that also gather the values at their positions: other programs look elsewhere."""
    found = list(statements)
    number = itertools.count(1 + max(s.id for s in statements if isinstance(s, Reduce)))
    for s in statements:
        among = [other for other in found if isinstance(other, Reduce)]
        if isinstance(s, Reduce) and s.position is not None and _extreme_of(s, among) is None:
            kind: ReduceKind = "max" if s.kind == "argmax" else "min"
            found.append(Reduce(next(number), kind, s.expr))
    return found


def one_row(kernel: Kernel) -> Kernel:
    """A sum over everything in one pass is one row, whatever loops it was cut into."""
    if len(kernel.phases) != 1 or kernel.template != ROWS or kernel.final:
        return kernel
    (phase,) = kernel.phases
    parts = {s.id: s for s in phase.inner if isinstance(s, Reduce)}
    if not phase.row or any(s.across for s in parts.values()):
        return kernel
    whole: list[Reduce] = []
    for s in phase.row:
        if not isinstance(s, Reduce) or not s.across or s.expr.op != "acc" or s.expr.args[0] not in parts:
            return kernel
        whole.append(Reduce(s.id, s.kind, parts[s.expr.args[0]].expr))
    if len({s.expr.args[0] for s in phase.row}) != len(parts):
        return kernel
    inner = (*whole, *(s for s in phase.inner if not isinstance(s, Reduce)))
    loops = (*kernel.outer, *kernel.inner)
    return merge_loops(
        replace(kernel, outer=(), inner=loops, phases=(Phase(inner, kernel.final_once),), final_once=())
    )


def _plain_columns(kernel: Kernel) -> Kernel:
    """Column sums are, on a GPU, reductions of rows across memory: nothing lives through several of
    them.
    """
    if kernel.template != COLS:
        return kernel
    inner = tuple(replace(s, across=False) if isinstance(s, Reduce) else s for s in kernel.phases[0].inner)
    return replace(kernel, phases=(replace(kernel.phases[0], inner=inner), *kernel.phases[1:]))


def _places(kernel: Kernel, x: Sequence[Var], r: Sequence[Var]) -> tuple[list[int], list[int]]:
    """Bytes of an element of each load, and of each store, that goes along r in order and over x (if any)
    too.
    """

    def counts(index: Index) -> bool:
        return bool(r) and is_one(index.coefficient(r[-1])) and (not x or any(_moves(index, v) for v in x))

    statements = list(kernel.statements())
    loads = [e.args[2].itemsize for e in walk(*roots(*statements)) if e.op == "load" and counts(e.args[1])]
    return loads, [s.memory.itemsize for s in statements if isinstance(s, Store) and counts(s.index)]


def _moves(index: Index, v: Var) -> bool:
    """Whether a position steps along a variable."""
    step = index.coefficient(v)
    return step is not None and not is_zero(step)


def _in_runs(axis: Axis, loads: Sequence[int], stores: Sequence[int]) -> Axis:
    """The axis with the same run for all accesses, 16 bytes of the widest: no value changes hands between
    threads then.

    Where the axis is taken apart into variables the compiler would not see runs any more.
    """
    sizes = {*loads, *stores}
    plain = sum(not v.single for v in axis.vars) == 1
    return replace(axis, run=16 // max(sizes)) if plain and len(sizes) > 1 else axis


def _acc_of(statements: Sequence[Store], number: int) -> Expr:
    return next(e for s in statements for e in walk(s.expr) if e.op == "acc" and e.args[0] == number)


def _read_total(s: Store, number: int, name: str, dtype: torch.dtype) -> Store:
    """A statement that reads a complete sum from memory."""
    total = load(name, Index({}, 0), dtype)
    return replace(
        s, expr=rewrite(s.expr, lambda e: total if e.op == "acc" and e.args[0] == number else None)
    )


# -- launches ------------------------------------------------------------------------------------------------


def plan_kernel(kernel: Kernel, new_buffer: NewBuffer, tuning: GpuTuning = DEFAULT) -> list[LaunchPiece]:
    """The launches of a kernel, in order; `new_buffer(spec)` makes memory for what one launch leaves for the
    next.
    """
    planner = Planner(new_buffer, tuning)
    overwrites = _keeps_what_it_overwrites(kernel)
    kernel = one_row(_plain_columns(_without_scratch(kernel)))
    if kernel.template == ROWS and planner.tile(kernel, *_axes(kernel)).looped:
        kernel = with_exp_sums(kernel)
    pieces = planner.pieces(kernel)
    decline_if(
        overwrites and any(piece.plan.looped for piece in pieces),
        "a value of a long row is kept while its operands are overwritten",
    )
    return pieces


def map_plan(kernel: Kernel) -> LaunchPlan:
    """How an elementwise kernel runs."""
    return Planner(_no_buffer, DEFAULT).map_plan(kernel)


def row_plan(kernel: Kernel) -> LaunchPlan | None:
    """How sums of rows run if that is one launch with a program a row that holds all of it; else None."""
    if kernel.template != ROWS or kernel.final or kernel.final_once:
        return None
    if len(kernel.phases) != 1 or any(s.across for s in kernel.statements() if isinstance(s, Reduce)):
        return None
    # Together they have programs enough: sums of many and of few rows take tiles of one kind.
    for tuning in (replace(DEFAULT, programs=DEFAULT.programs // 8), DEFAULT):
        plan = Planner(_no_buffer, tuning).tile(kernel, *_axes(kernel))
        if plan.form == "rows" and not plan.looped and (plan.x.block == 1 or plan.x.exact):
            return plan
    return None


def _no_buffer(spec: TensorSpec) -> str:
    raise AssertionError("one launch leaves nothing for another")


@dataclass(frozen=True, slots=True)
class Planner:
    """Chooses tiles and cuts a kernel into launches. new_buffer: makes memory between launches."""

    new_buffer: NewBuffer
    tuning: GpuTuning

    def pieces(self, kernel: Kernel) -> list[LaunchPiece]:
        if kernel.template == SCAN:
            return [_piece(kernel, self.tile(kernel, kernel.outer, kernel.inner, "scan"))]
        reductions = [s for s in kernel.statements() if isinstance(s, Reduce)]
        across = [s for s in reductions if s.across]
        if across:
            return self.across(kernel, across)
        if is_map(kernel):
            return [_piece(kernel, self.map_plan(kernel))]
        if kernel.template == ROWS and (kernel.final or kernel.final_once):
            finals = self.maps_of(kernel, kernel.final, kernel.final_once)  # over the row's positions alone
            return [*self.rows(replace(kernel, final=(), final_once=())), *finals]
        return self.rows(kernel)

    def map_plan(self, kernel: Kernel) -> LaunchPlan:
        """Elementwise: one axis, or two where some accesses are contiguous along another variable than the
        last.
        """
        loops = (*kernel.outer, *kernel.middle, *kernel.inner)
        total = _count(loops)
        wide = is_wide(kernel)
        last = loops[-1] if loops else None
        if last is not None and last.size >= 16:
            others = [v for v in loops[:-1] if v.size >= 16 and _only_along(kernel, v, last)]
            if others:
                other = max(others, key=lambda v: (contiguous_along(kernel, v), hint(v.size)))
                rest = [v for v in loops[:-1] if v is not other]
                bytewise = _stores_bytes_along(kernel, other) and last.size >= 64
                rows, columns, warps = self.tuning.crossed_bytes if bytewise else self.tuning.crossed
                x = Axis.of("x", [*rest, other], rows, exact=None)
                r = Axis.of("r", [last], 32 if last.size < 64 else columns)
                return LaunchPlan("map", x, r, warps=warps, wide=wide)
            if not kernel.streams() and _reads_rows(kernel, loops[:-1], last):
                if last.size >= self.tuning.long_row and _count(loops[:-1]) >= 2 * self.tuning.programs:
                    return self.by_vectors(kernel, self.loop_plan(loops[:-1], loops[-1:], wide))
        if type(total) is Size:
            block = 1024 if total > 256 * 4 * self.tuning.programs else 128
        else:
            block = min(1024, max(128, power_of_two(total // (4 * self.tuning.programs))))
        return LaunchPlan("map", Axis.of("x", loops, block), warps=max(1, block // 256), wide=wide)

    def tile(self, kernel: Kernel, x: Sequence[Var], r: Sequence[Var], form: Form = "rows") -> LaunchPlan:
        """Tile sizes for rows `x` over `r`."""
        if _strided(kernel, x, r):
            return self.strided_tile(kernel, x, r, form)
        rows, row = _count(x), _count(r)
        passes = sum(1 for p in kernel.phases if p.inner)
        in_bytes = passes == 1 and form == "rows" and max(_places(kernel, x, r)[0], default=4) == 1
        longest = self.tuning.bytes if in_bytes else self.tuning.loop_tile
        looped = row > self.tuning.whole_row or (passes == 1 and row > longest)
        r_block = self.loop_tile(row) if looped else power_of_two(row)
        in_bytes = in_bytes and not looped and r_block >= 512
        most = self.tuning.bytes if in_bytes else 1024
        x_block = _rows_of_tile(rows, max(1, most // r_block), self.tuning.programs)
        each = self.tuning.loop_warp if looped else 2048 if in_bytes and x_block * r_block >= 4096 else 512
        if looped and passes == 1 and max(_places(kernel, x, r)[0], default=4) <= 2:
            each //= 2  # a thread's 16 bytes
        few = not looped and type(rows) is int and rows <= self.tuning.few
        if few:
            each = min(each, self.tuning.few_warp)
        warps = min(
            32 if r_block * x_block >= self.tuning.whole_row else 16, max(1, r_block * x_block // each)
        )
        if r_block <= self.tuning.one_warp and not divides(4, row):
            warps = 1
        return LaunchPlan(
            form,
            Axis.of("x", x, x_block),
            Axis.of("r", r, r_block),
            looped,
            warps=warps,
            wide=is_wide(kernel),
            few=few and x_block * r_block <= 32 * warps * self.tuning.thread,
        )

    def strided_tile(self, kernel: Kernel, x: Sequence[Var], r: Sequence[Var], form: Form) -> LaunchPlan:
        """Tile sizes for rows across memory."""
        rows, row = _count(x), _count(r)
        passes = sum(1 for p in kernel.phases if p.inner)
        sums = passes == 1 and form == "rows"
        each = self.each(kernel, r, x) if sums else self.tuning.thread
        few = 512 if min(_places(kernel, r, x)[0], default=4) < 4 else 1024
        if sums and row <= few and rows < 64 * self.tuning.programs:  # a few whole rows for each program
            x_block, r_block = _capped(rows, 16 if row <= 512 else 8), power_of_two(row)
        else:
            x_block = _capped(rows, 64)
            r_block = _capped(row, max(1, self.tuning.loop_tile * each // self.tuning.thread // x_block))
        if passes > 1 and r_block < row and row * 8 <= self.tuning.whole_row:
            r_block = power_of_two(row)
            x_block = max(min(x_block, self.tuning.whole_row // r_block), 1)
        warps = min(
            32 if r_block * x_block >= self.tuning.whole_row else 16, max(1, r_block * x_block // (32 * each))
        )
        axes = Axis.of("x", x, x_block), Axis.of("r", r, r_block)
        return LaunchPlan(form, *axes, r_block < row, warps=warps, wide=is_wide(kernel))

    def loop_tile(self, row: Dim) -> int:
        tile = self.tuning.long_tile if row > self.tuning.whole_row else self.tuning.loop_tile
        return tile // 2 if not divides(tile, row) and divides(tile // 2, row) else tile

    def loop_plan(self, x: Sequence[Var], r: Sequence[Var], wide: bool) -> LaunchPlan:
        """A program a row that goes through it in a loop."""
        tile = self.loop_tile(_count(r))
        return LaunchPlan(
            "rows",
            Axis.of("x", x, 1),
            Axis.of("r", r, tile),
            True,
            warps=max(1, tile // self.tuning.loop_warp),
            wide=wide,
        )

    def by_vectors(self, kernel: Kernel, plan: LaunchPlan) -> LaunchPlan:
        """The plan of a loop over long rows with tiles that start at vectors, where rows or masks would break
        these.
        """
        plain = type(plan.r.size) is int and not any(
            is_symbolic(index.terms.values()) for index in accesses(kernel)
        )
        found = (
            vectors_of(kernel, plan.r.vars) if plain and plan.x.block == 1 and not kernel.streams() else None
        )
        if found is None or type(plan.r.size) is not int:
            return plan
        if found.start == Index({}, 0) and (plan.r.exact or plan.r.size % found.unit == 0):
            return replace(plan, run=found.unit)
        if plan.r.size < 2 * plan.r.block:
            return plan
        return replace(plan, vectors=found, run=found.unit)

    def rows(self, kernel: Kernel) -> list[LaunchPiece]:
        """Reductions along r, cut into chunks when there are few rows, long, and only one pass over them."""
        x, r = _axes(kernel)
        plan = self.tile(kernel, x, r)
        tiles = -(-plan.x.size // plan.x.block)
        reductions = [s for s in kernel.phases[0].inner if isinstance(s, Reduce)]
        passes = sum(1 for p in kernel.phases if p.inner)
        if (
            plan.looped
            and passes > 1
            and tiles * 2 < self.tuning.programs
            and plan.r.size > 4 * self.tuning.loop_tile
        ):
            return self.by_phases(kernel, x)
        single = passes == 1 and all(s.position is None or s.expr.dtype is not BOOL for s in reductions)
        chunks = self.chunks_of_rows(tiles, plan) if plan.looped and single and reductions else 1
        if chunks < 2:
            return [_piece(kernel, self.by_vectors(kernel, plan) if plan.looped else plan)]
        per = -(-plan.r.size // chunks)
        per = -(-per // plan.r.block) * plan.r.block
        if type(per) is int:
            chunks = -(-plan.r.size // per)
        plan = replace(
            plan, chunks=chunks, per_chunk=per, second=replace(plan.r, exact=equal(per * chunks, plan.r.size))
        )
        plan = self.by_vectors(kernel, plan)
        inner = tuple(_with_extremes(kernel.phases[0].inner))
        reductions = [s for s in inner if isinstance(s, Reduce)]
        partial = self.room(reductions, chunks * plan.x.size)
        first = replace(kernel, phases=(Phase(inner),), final=(), final_once=())
        chunk = Var("chunk", chunks)
        at = flatten([Index.of(v) for v in (chunk, *x)], contiguous_stride([chunks, *(v.size for v in x)]))
        found = {s.id: load(partial[s.id][0], at, partial[s.id][1]) for s in reductions}
        rest = (
            *kernel.phases[0].row,
            *(s for p in kernel.phases[1:] for s in p.row),
            *kernel.final,
            *kernel.final_once,
        )
        second = Kernel(COLS, x[:-1], (chunk,), x[-1:], _joined(reductions, found), final=rest)
        return [_piece(first, plan, partial), *self.rows(second)]

    def chunks_of_rows(self, tiles: Dim, plan: LaunchPlan) -> int:
        """Programs that share a tile of rows. Where sizes differ between calls: a power of two, and the last
        ones may get nothing.
        """
        each = 2 * plan.r.block
        if type(tiles) is int and type(plan.r.size) is int:
            return min(self.tuning.programs * 2 // tiles, -(-plan.r.size // each))
        if tiles > self.tuning.programs or plan.r.size <= each:
            return 1
        return min(
            power_of_two(self.tuning.programs // power_of_two(tiles)), power_of_two(-(-plan.r.size // each))
        )

    def by_phases(self, kernel: Kernel, x: Sequence[Var]) -> list[LaunchPiece]:
        """Few long rows in several passes: a kernel a pass, which many programs can share; row results go
        through memory.
        """
        at = row_major(x)
        count = numel(v.size for v in x)
        ready: dict[int, Expr] = {}
        pieces: list[LaunchPiece] = []
        last = len(kernel.phases) - 1

        def swap(statements: Sequence[Statement]) -> tuple[Statement, ...]:
            memo: dict[Expr, Expr] = {}
            return tuple(
                rebuild(s, lambda e: ready.get(e.args[0]) if e.op == "acc" else None, memo)
                for s in statements
            )

        for n, phase in enumerate(kernel.phases):
            inner, row = swap(phase.inner), list(swap(phase.row))
            made = [s for s in phase.inner if isinstance(s, Reduce)]
            for s in made if n < last else ():
                found = next(
                    (
                        e
                        for t in kernel.statements()
                        for e in walk(t.expr)
                        if e.op == "acc" and e.args[0] == s.id
                    ),
                    None,
                )
                if found is not None:
                    name = self.new_buffer(TensorSpec.dense((count,), found.dtype))
                    row.append(Store(name, at, found, found.dtype))
                    ready[s.id] = load(name, at, found.dtype)
            if inner and not made and not row:
                k = Kernel(
                    ROWS,
                    (*kernel.outer, *kernel.middle, *kernel.inner)[:-1],
                    (),
                    (*kernel.outer, *kernel.middle, *kernel.inner)[-1:],
                    (Phase(inner),),
                )
            else:
                k = replace(kernel, phases=(Phase(inner, tuple(row)),), final=(), final_once=())
            pieces += self.pieces(k)
        return pieces

    def room(self, reductions: Sequence[Reduce], count: Dim) -> dict[int, tuple[str, torch.dtype]]:
        """Buffers for partial results."""
        dtypes = {s.id: s.expr.dtype if s.position is None else I64 for s in reductions}
        return {n: (self.new_buffer(TensorSpec.dense((count,), dtype)), dtype) for n, dtype in dtypes.items()}

    def across(self, kernel: Kernel, across: Sequence[Reduce]) -> list[LaunchPiece]:
        """Rows in chunks, each with its own accumulators; then kernels that add the chunks up and finish."""
        x, r = _axes(kernel)
        lanes = [s for p in kernel.phases for s in p.inner if isinstance(s, Reduce) and s.across]
        numbers = [s for s in across if s not in lanes]
        alone = len(kernel.phases) == 1 and not kernel.phases[0].row and all(s in lanes for s in across)
        alone = alone and not any(isinstance(s, Reduce) and not s.across for s in kernel.phases[0].inner)
        plan, programs = (self.columns if alone else self.rows_and_columns)(kernel, x, r)
        decline_if(plan.looped and lanes, "sums over the columns of very long rows beside sums over rows")
        tiles = -(-plan.x.size // plan.x.block)
        chunks = min(tiles, max(programs // hint(plan.columns), 1))
        per = -(-tiles // chunks) * plan.x.block
        if type(per) is int:
            chunks = -(-plan.x.size // per)
        plan = replace(
            plan, chunks=chunks, per_chunk=per, x=replace(plan.x, exact=equal(per * chunks, plan.x.size))
        )
        partial = {**self.room(lanes, chunks * plan.r.size), **self.room(numbers, chunks)}
        first = replace(kernel, final=(), final_once=())
        return [_piece(first, plan, partial), *self.finish(kernel, lanes, numbers, partial, chunks)]

    def columns(self, kernel: Kernel, x: Sequence[Var], r: Sequence[Var]) -> tuple[LaunchPlan, int]:
        """Sums over columns alone need no whole rows: small tiles, each program a few of them one below the
        other.
        """
        rows, row = _count(x), _count(r)
        r_block = self.tuning.columns
        while not divides(r_block, row):
            r_block //= 2
        if r_block < self.tuning.columns // 4:
            r_block = _capped(row, self.tuning.columns)
        each = self.each(kernel, x, r)
        x_block = _capped(rows, 128 * each // r_block)
        warps = max(1, x_block * r_block // (32 * each))
        programs = 4 * self.tuning.programs
        if type(rows) is int and type(row) is int:
            programs = min(programs, max(min(-(-rows // (2 * x_block)), 1024), 1) * -(-row // r_block))
        axes = Axis.of("x", x, x_block), _in_runs(Axis.of("r", r, r_block), *_places(kernel, x, r))
        return LaunchPlan("across", *axes, warps=warps, wide=is_wide(kernel)), programs

    def rows_and_columns(self, kernel: Kernel, x: Sequence[Var], r: Sequence[Var]) -> tuple[LaunchPlan, int]:
        """Few whole rows at a time, the lanes along them: a thread adds up its columns, a program its rows.

        Each step waits for sums of rows in its middle, so loads run ahead of the loop.
        """
        if _strided(kernel, x, r) or _count(r) > self.tuning.whole_row:
            return replace(self.tile(kernel, x, r), form="across"), self.tuning.programs
        rows, r_block = _count(x), power_of_two(_count(r))
        loads, stores = _places(kernel, (), r)
        run = 16 // max(loads + stores, default=4)
        warps = min(
            32,
            max(1, min(self.tuning.row_warps, r_block // (32 * run)), r_block // (32 * self.tuning.thread)),
        )
        programs = max(self.tuning.programs * self.tuning.row_warps // warps, self.tuning.programs // 2, 1)
        x_block = _rows_of_tile(rows, max(1, self.tuning.thread * 32 * warps // r_block), programs)
        resident = (
            x_block * r_block * max(1, 2 * self.tuning.row_warps // warps)
        )  # elements of the programs of one multiprocessor
        stages = self.stages(kernel, resident * sum(_places(kernel, x, r)[0]))
        axes = Axis.of("x", x, x_block), _in_runs(Axis.of("r", r, r_block), loads, stores)
        fold = x_block > 1 and r_block >= 32 * run
        return LaunchPlan(
            "across", *axes, warps=warps, wide=is_wide(kernel), fold=fold, stages=stages
        ), programs

    def each(self, kernel: Kernel, x: Sequence[Var], r: Sequence[Var]) -> int:
        """Elements of a thread in a tile of columns: registers for the loads and sums of 32 warps a
        multiprocessor.
        """
        sums = sum(isinstance(s, Reduce) for s in kernel.statements())
        return self.tuning.thread if len(_places(kernel, x, r)[0]) + sums <= 3 else self.tuning.thread // 2

    def stages(self, kernel: Kernel, loaded: int) -> int:
        """Of a loop that loads so many bytes a step; no load may run ahead of stores to its memory or of a
        check of its position.
        """
        written = {s.buffer for s in kernel.statements() if isinstance(s, Store)}
        exprs = list(walk(*roots(*kernel.statements())))
        plain = not any(
            e.op in ("wrap_index", "masked") or (e.op == "load" and e.args[0] in written) for e in exprs
        )
        return self.tuning.stages if plain and loaded * (self.tuning.stages - 1) <= self.tuning.shared else 0

    def finish(
        self,
        kernel: Kernel,
        lanes: Sequence[Reduce],
        numbers: Sequence[Reduce],
        partial: Mapping[int, tuple[str, torch.dtype]],
        chunks: Dim,
    ) -> list[LaunchPiece]:
        """Kernels that add up the chunks' partial results and do the final statements."""
        pieces: list[LaunchPiece] = []
        chunk = Var("chunk", chunks)
        final = [of_kind(s, Store) for s in kernel.final]
        once = [of_kind(s, Store) for s in kernel.final_once]
        if numbers:
            sums = tuple(
                Reduce(s.id, s.kind, load(partial[s.id][0], Index.of(chunk), partial[s.id][1]))
                for s in numbers
            )
            totals: list[Store] = []
            for s in numbers:
                if any(e.op == "acc" and e.args[0] == s.id for f in final for e in walk(f.expr)):
                    name = self.new_buffer(TensorSpec.dense((1,), s.expr.dtype))
                    totals.append(Store(name, Index({}, 0), _acc_of(final, s.id), s.expr.dtype))
                    final = [_read_total(f, s.id, name, s.expr.dtype) for f in final]
            second = Kernel(ROWS, (), (), (chunk,), (Phase(sums, (*totals, *once)),))
            pieces += self.rows(second)
            once = []
        if lanes:
            r = kernel.inner
            at = flatten(
                [Index.of(v) for v in (chunk, *r)], contiguous_stride([chunks, *(v.size for v in r)])
            )
            sums = tuple(Reduce(s.id, s.kind, load(partial[s.id][0], at, partial[s.id][1])) for s in lanes)
            third = Kernel(COLS, r[:-1], (chunk,), r[-1:], (Phase(sums),), final=tuple(final))
            pieces += self.rows(third)
            final = []
        return pieces + self.maps_of(kernel, final, once)

    def maps_of(
        self, kernel: Kernel, final: Sequence[Statement], once: Sequence[Statement]
    ) -> list[LaunchPiece]:
        """Final statements that read no sum."""
        pieces = []
        for statements, loops in ((final, kernel.inner), (once, ())):
            if statements:
                k = Kernel(ROWS, loops[:-1], (), loops[-1:], (Phase(tuple(statements)),))
                pieces.append(_piece(k, self.map_plan(k)))
        return pieces
