"""The C++ function of a "rows" kernel: parallel over rows, each phase a pass over the row.

for (row) { phase 0: vector loop; accumulators; phase 1: ...; row stores }   then sums across rows are
combined
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..base.config import config
from ..base.errors import UsageError
from ..graph.sizes import Dim, Size, divides, equal, hint, known
from ..graph.spec import contiguous_stride, numel
from ..lower.fusion import elements
from ..lower.index_expr import Index, Var, determined, flatten, is_one, is_zero, row_major
from ..lower.ir import (
    BOOL,
    F32,
    F64,
    I64,
    Expr,
    Kernel,
    Phase,
    Reduce,
    Scratch,
    Statement,
    Store,
    fits,
    loaded_exprs,
    of_kind,
    roots,
    walk,
)
from ..runtime.cpp_text import loop
from .cpp_body import CppBody, CppScope
from .cpp_narrow import NarrowLanes, narrow_lanes
from .cpp_ops import ACROSS_LANES, COMBINE, MEMORY, ctype, reduce_start
from .cpp_positions import Positions, in_lanes, without_tracked
from .cpp_sums import STRIP, Strips, loses
from .lane_conditions import comparisons, same_for_all_lanes

PARALLEL_WORK = 1 << 15  # additions below which a kernel runs on one thread
HEAVY_MAP = 16  # additions an element of a map that waits for its own operations
CALLED = 40  # additions that operations of a library cost
MOST_UNROLLED = 16  # expressions of a loop whose turns take several vectors
LIGHT_MAP = 8  # additions an element of a map that waits for memory
STREAMED = 1 << 18  # elements above which a buffer is not expected to fit in a core's own cache
TAIL = 4  # lanes of the loop behind the widest vectors, where only the call tells how many elements are left
RUN = 1 << 11  # bytes of a run that the C library copies
COPIED = 1 << 18  # bytes of all runs
COPIED_BLOCK = 1 << 17  # bytes of a long run that one task takes
BLOCK = 4096  # elements of a long single loop that one task takes
ROW, FINAL = Var("@row", 0), Var("@final", 0)
ONCE = Var("@once", 0)


class Isa(NamedTuple):
    """An instruction set: floats a vector, the compiler's flags, and its name in /proc/cpuinfo ("": every
    processor has it).
    """

    width: int
    flags: tuple[str, ...]
    name: str

    @property
    def is_here(self) -> bool:
        """Whether this processor can run it."""
        return not self.name or self.name in processor_features()


_WIDE = "-mprefer-vector-width=512"  # of x86-64 alone
ISAS = {
    "avx512": Isa(16, ("-march=x86-64-v4", _WIDE), "avx512f"),
    "avx2": Isa(8, ("-march=x86-64-v3", _WIDE), "avx2"),
    "neon": Isa(4, ("-march=armv8-a",), "asimd"),
    "sve": Isa(4, ("-march=armv8.2-a+sve",), "sve"),
    "portable": Isa(4, (), ""),
}


@functools.cache
def processor_features() -> frozenset[str]:
    """The instruction sets that /proc/cpuinfo names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        word
        for line in lines
        if line.startswith(("flags", "Features"))
        for word in line.split(":", 1)[1].split()
    )


def isa() -> Isa:
    """The instruction set of `config.isa`, or this machine's; UsageError DM109 for an unknown name."""
    if not config.isa:
        found = processor_features()
        width = 16 if "avx512f" in found else 8 if "avx2" in found else 4
        return Isa(width, ("-march=native", *((_WIDE,) if width > 4 else ())), "")
    if config.isa not in ISAS:
        raise UsageError(
            "DM109",
            f"config.isa names no known instruction set: {config.isa!r}",
            cure=f"one of {', '.join(ISAS)}",
        )
    return ISAS[config.isa]


def machine_width() -> int:
    """Floats in the widest vector of this machine, or of the instruction set that `config.isa` names."""
    return isa().width


def all_exprs(statements: Iterable[Statement]) -> list[Expr]:
    """Every distinct expression of the statements."""
    return list(walk(*roots(*statements)))


def pick_width(exprs: Iterable[Expr], loop: Var) -> int:
    """Lanes of the vector loop: the machine's, half when 64-bit values change along it, fewer when it is
    short.
    """
    size, width = (
        loop.size if type(loop.size) is int else max(hint(loop.size), machine_width()),
        machine_width(),
    )
    exprs = list(exprs)
    half = width // 2
    uniform = {
        c
        for e in exprs
        if e.op == "masked" and (comparisons(e.args[0]) or same_for_all_lanes(e.args[0], loop, width))
        for c in walk(e.args[0])
    }
    wide = {e for e in exprs if e.dtype in (F64, I64) and loop in e.vars and e not in uniform}
    if wide and not (width == 16 and _only_converted(wide, exprs, loop)):
        width = half
    while width > 4 and width > size:
        width //= 2
    return 1 if size < width or width < 4 else width


def _only_converted(wide: set[Expr], exprs: Sequence[Expr], loop: Var) -> bool:
    """Whether 64-bit values are loads whose readers make them narrower: their registers are free again."""
    readers = [e for e in exprs if wide.intersection(e.children)]
    return (
        all(e.op == "load" and e.args[1].coefficient(loop) in (0, 1, 2) for e in wide)
        and all(e.op == "cast" and e.dtype not in (F64, I64) for e in readers)
        and wide == {child for e in readers for child in e.children}
    )


def times(a: str, b: str) -> str:
    """A product of sizes, computed where both are numbers."""
    return str(int(a) * int(b)) if a.isdigit() and b.isdigit() else f"{a}*{b}"


def beyond(offset: str, count: str) -> str:
    """The next multiple of 64 bytes behind `count` numbers of 8 bytes at an offset."""
    span = str(-(-int(count) * 8 // 64) * 64) if count.isdigit() else f"({count}*8+63)/64*64"
    return str(int(offset) + int(span)) if offset.isdigit() and span.isdigit() else f"{offset}+{span}"


def _same_bits(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether a number of one memory type has the same bits in the other."""
    whole = not any(dtype.is_floating_point or dtype is torch.bool for dtype in (a, b))
    return a is b or whole and a.itemsize == b.itemsize


class Emitter:
    """What both templates share."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.halved = False
        self.types = [MEMORY[p[1]] for p in kernel.params]
        self.names = {p[0]: f"p{n}" for n, p in enumerate(kernel.params)}
        self.exprs = all_exprs(kernel.statements())
        self.body = CppBody(self.names, kernel.streams(), self.exprs)
        self.accs: dict[int, Expr] = {e.args[0]: e for e in self.exprs if e.op == "acc"}
        self.scans: dict[int, Expr] = {e.args[0]: e for e in self.exprs if e.op == "scan"}
        self.lane = kernel.inner[-1] if kernel.inner else None
        self.size: Dim = self.lane.size if self.lane else 1
        self.width = pick_width(self.exprs, self.lane) if self.lane else 1
        self.strips = Strips(())
        self.top = CppScope(None)
        self.stores: list[
            tuple[Store, Collection[Var]]
        ] = []  # as they are emitted, with the variables bound there
        self.vars = {
            v: f"{part}{n}"
            for part, vs in (("o", kernel.outer), ("m", kernel.middle), ("n", kernel.inner))
            for n, v in enumerate(vs)
        }

    def pointers(self) -> str:
        """Typed pointers to the buffers."""
        lines = []
        for n, (_, memory, written) in enumerate(self.kernel.params):
            t = MEMORY[memory]
            lines.append(f"{'' if written else 'const '}{t}*p{n}=({t}*)P[{n}];")
        if any(e.op == "wrap_index" for e in self.exprs):
            lines.append(f"i64*const outside=(i64*)P[{len(self.types)}];")
        return "".join(lines)

    def function(self, name: str) -> str:
        """The whole C++ function."""
        text = self.text()
        numbers = [
            f"const i64 {s.name}=ints[{len(self.kernel.streams()) + n}];"
            for n, s in enumerate(self.kernel.symbols)
        ]
        numbers += [f"const i64 {z}={size};" for size, z in self.body.sizes.items()]
        head = f"{''.join(numbers)}{self.pointers()}\n{''.join(self.top.lines)}"
        return f'extern "C" void {name}(void**P,const i64*ints){{{head}{text}}}\n'

    def text(self) -> str:
        """The function's statements."""
        raise NotImplementedError

    def number(self, n: Dim) -> str:
        """A size as C++ text."""
        return self.body.number(n)

    def work(self) -> Dim:
        """Additions of one call, roughly."""
        k = self.kernel
        each = sum(e.cost for e in self.exprs)
        return numel(v.size for v in (*k.outer, *k.middle, *k.inner)) * max(each, 1)

    def over(self, name: str, tasks: Dim, count: str, inside: str) -> str:
        """A loop of `name` up to `count`, on several threads when that pays for `tasks` tasks.

        A call on one thread does not pay for OpenMP, which takes as long as a small kernel.
        """
        work = self.work()
        if config.threads == 1 or is_one(tasks) or type(work) is int and work < PARALLEL_WORK:
            return loop(name, count, inside)
        pays = "true"
        if type(tasks) is Size or type(work) is Size:
            pays = f"{self.number(work)}>={PARALLEL_WORK}&&{self.number(tasks)}>1"
        part = loop(name, "last_", inside, start="first_")
        tasks_of = f"over({pays},last_,{config.threads or 0},[=](i64 first_,i64 last_){{{part}}});"
        return f"{{const i64 first_=0,last_={count};{tasks_of}}}"

    def chunks(self, rows: Dim, least: int | str, nbytes: Dim) -> tuple[str, str]:
        """In how many parts rows with sums of `nbytes` each are gone through, and the line that computes it
        at the call. least: parts that give all threads work (as text where sizes decide it).
        """
        work = self.work()
        if all(type(n) is int for n in (work, rows, least, nbytes)):
            count: Any = 1 if work < PARALLEL_WORK else min(rows, least)
            while count > 1 and count * nbytes > 1 << 22:
                count //= 2
            return str(count), ""
        parts = f"{self.number(work)}>={PARALLEL_WORK},{self.number(rows)},{least},{self.number(nbytes)}"
        return "chunks", f"const i64 chunks=parts({parts});"

    def add_chunks(
        self, s: Reduce, t: str, first: str, other: str, chunks: str, scope: CppScope, width: int
    ) -> None:
        """Combine the chunks' results in order: the first one with each `other`, whose number is c_."""
        result = self.body.fresh()
        more = f"for(i64 c_=1;c_<{chunks};c_++)s_={COMBINE[s.kind].format('s_', other)};"
        scope.lines.append(f"{t} {result};{{{t} s_={first};{more}{result}=s_;}}")
        self.complete(s, scope, result, width)

    def complete(self, s: Reduce, scope: CppScope, name: str, width: int) -> None:
        """The reduction's result has this name from now on."""
        if s.id in self.accs:
            scope.values[self.accs[s.id]] = name, width

    def stored(self, s: Store, scope: CppScope) -> tuple[Expr, str, Dim | None]:
        """A store's expression, its value's name and the step from lane to lane."""
        vector, expr = scope.vector, s.expr
        step = s.index.coefficient(vector) if vector is not None and scope.width > 1 else 1
        if expr.op == "round_to" and expr.args[1] is s.memory and expr.dtype is F32:
            expr = expr.args[0]  # the store rounds
        if vector is not None and scope.width > 1 and not is_zero(step):
            return expr, self.body.operand(expr, scope, scope.width), step
        return expr, self.body.value(expr, scope), 1

    def holds(self, e: Expr, memory: torch.dtype) -> bool:
        """Whether a value is a number of the memory's type."""
        return fits(e, memory)

    def store(self, s: Store, scope: CppScope) -> None:
        """Emit one store in a scope."""
        self.stores.append((s, scope.bound.keys()))
        vector = scope.vector
        pointer = self.names[s.buffer]
        expr, value, step = self.stored(s, scope)
        at = f"{pointer}+{self.body.index(s.index, scope)}"
        self.body.rereads.store(s.buffer)
        mark = "b" if s.memory is BOOL else ""
        kind = "" if s.memory is BOOL else f"<{MEMORY[s.memory]}>"
        if s.memory.is_complex:
            mark, kind = "c", "_"
        exact = "e" if s.memory is torch.bfloat16 and self.holds(expr, s.memory) else ""
        computed = any(e.op == "wrap_index" for e in walk(*loaded_exprs(s.index)))
        guard = "if(!*outside)" if computed else ""  # as eager, which ends at the first such position
        if s.add:
            t = ctype(s.expr.dtype, scope.width if vector is not None else 1)
            place = self.body.fresh()
            stored = f"{guard}st{kind}({place},ld<{t}>({place})+({t}){value});"
            scope.lines.append(f"{{{MEMORY[s.memory]}*const {place}={at};{stored}}}")
        elif is_one(step):
            width = scope.width if vector is not None else 1
            t = ctype(s.expr.dtype, width)
            scope.lines.append(
                f"{guard}st{mark}{exact}{kind}({at},({t}){value});"
                if width == 1
                else f"{guard}st{mark}{exact}{kind}({at},{value});"
            )
        else:
            assert step is not None  # places that are computed are taken lane by lane
            scope.lines.append(f"{guard}st{mark}g{kind}({at},{self.number(step)},{value});")

    def decode(self, flat: str, loops: Sequence[Var], names: dict[Var, str]) -> str:
        """Lines that compute loop variables from their flat position."""
        lines = []
        for v, step in zip(loops, contiguous_stride([v.size for v in loops]), strict=True):
            text = flat if is_one(step) else f"{flat}/{self.number(step)}"
            text = text if v is loops[0] else f"({text})%{self.number(v.size)}"
            lines.append(f"const i64 {names[v]}={text};")
        return "".join(lines)

    def accumulate(self, s: Reduce, acc: str, scope: CppScope) -> None:
        """acc = kind(acc, value)."""
        value = self.body.operand(s.expr, scope, scope.width)  # no other loop sums it again: it may be fused
        scope.lines.append(f"{acc}={COMBINE[s.kind].format(acc, value)};")

    # -- loops -----------------------------------------------------------------------------------------------
    def take_lanes(self) -> None:
        """More lanes, of narrower elements, where these are enough."""
        if self.width == machine_width():
            self.width = narrow_lanes(self.kernel, self.width) or self.width
        if self.width > 1:
            self.body.widths.add(self.width)

    def tail(self) -> int:
        """Lanes of the loop behind that of the widest vectors; 0 where there is none."""
        if type(self.width) is NarrowLanes:
            return 0 if divides(self.width, self.size) else machine_width()
        leaves = self.width > TAIL and type(self.size) is Size and not divides(self.width, self.size)
        return TAIL if leaves else 0

    def nest(
        self,
        loops: Sequence[Var],
        parent: CppScope,
        emit: Callable[[CppScope, int | str], None],
        limits: tuple[str, str] | None = None,
        unroll: int = 1,
        extra: Sequence[tuple[Var, str]] = (),
        before: Callable[[CppScope], None] = lambda scope: None,
    ) -> None:
        """Loops over `loops`, the last one in vectors; `emit(scope, copy)` fills the innermost block.

        before: begins each block of an unrolled loop. No store stands between these beginnings, so that the
        compiler may mix them.
        """
        if not loops:
            scope = CppScope(parent, [*extra])
            emit(scope, 0)
            parent.lines.append("{" + "".join(scope.lines) + "}")
            return
        v, name = loops[0], self.vars[loops[0]]
        if len(loops) > 1:
            scope = CppScope(parent, [(v, name), *extra])
            self.nest(loops[1:], scope, emit, limits, unroll, extra, before)
            body = self.strips.loop(v, name, 1, self.number(v.size), "".join(scope.lines))
            parent.lines.append(f"{{i64 {name}=0;{body}}}")
            return
        lo, hi = limits or ("0", self.number(v.size))
        lines = [f"{{i64 {name}={lo};"]

        def add(width: int, copies: Sequence[int | str]) -> None:
            """The loop whose turn is one block of vectors, or a few one behind the other."""
            blocks: list[str] = []
            scopes = []
            for n, copy in enumerate(copies):
                at = f"{name}_{copy}" if len(copies) > 1 else name
                scope = CppScope(parent, [(v, at), *extra], width, v if width > 1 else None)
                scope.aligned = width > 1  # limits are multiples of BLOCK
                scope.lines = blocks
                if len(copies) > 1:
                    blocks.append(f"const i64 {at}={name}+{n * width};")
                    before(scope)
                scopes.append(scope)
            for scope, copy in zip(scopes, copies, strict=True):
                emit(scope, copy)
            lines.append(self.strips.loop(v, name, len(copies) * width, hi, "".join(blocks)))

        width = self.width if type(v.size) is Size or v.size >= self.width else 1
        tail = self.tail() if width > 1 else 0
        if width > 1 and unroll > 1:
            add(width, range(unroll))
        if width > 1 and (unroll == 1 or not divides(unroll * width, v.size)):
            add(width, [0])
        if tail:
            self.body.widths.add(tail)
            add(tail, ["t"])
        if width == 1 or not divides(tail or width, v.size):
            add(1, [0])
        parent.lines.append("".join(lines) + "}")


class RowsEmitter(Emitter):
    """The "rows" template."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        if not in_lanes(kernel):
            self.width = 1
        self.scatters = [s for s in kernel.statements() if isinstance(s, Store) and s.scatters]
        if not all(kernel.inner and self.stores_distinct_places(kernel.inner[-1], s) for s in self.scatters):
            self.width = 1
        self.take_lanes()
        self.across = [
            (s, True) for p in kernel.phases for s in p.inner if isinstance(s, Reduce) and s.across
        ]
        self.across += [
            (s, False) for p in kernel.phases for s in p.row if isinstance(s, Reduce) and s.across
        ]
        self.is_map = (
            len(kernel.phases) == 1
            and not any(isinstance(s, Reduce) for s in kernel.statements())
            and not kernel.phases[0].row
        )
        self.inner_count = numel(v.size for v in kernel.inner)
        self.loaded = {e.args[0] for e in self.exprs if e.op == "load"}
        self.row_buffers = 0  # of a length that is known at the call

    @staticmethod
    def stores_distinct_places(v: Var, s: Store) -> bool:
        """Whether a vector along v can be scattered: its elements go to different places, which follow each
        other.
        """
        return v in determined(s.index) and is_one(s.index.coefficient(v))

    # -- the function ----------------------------------------------------------------------------------------
    def text(self) -> str:
        text = self._with_across() if self.across else self._plain()
        return text.replace("@rows@", str(self.row_buffers))

    def take_half_the_lanes(self) -> None:
        """For a map that waits for memory: a load of 64 bytes waits for the store before it where both
        buffers begin at nearly the same place in a page, as two that were allocated one after the other do.
        """
        light = self.is_map and not self.scatters and sum(e.cost for e in self.exprs) <= LIGHT_MAP
        narrow = self.width.element if type(self.width) is NarrowLanes else None
        if narrow:
            as_stored = self.width == 64  # 16 narrow lanes are equal to 16 others in a set of widths
        else:
            as_stored = all(e.args[2].itemsize >= 4 for e in self.exprs if e.op == "load")
        if not (light and as_stored and machine_width() == 16 and hint(self.size) >= 16 <= 2 * self.width):
            return
        self.halved = True
        self.body.widths.discard(self.width)
        self.width = NarrowLanes(self.width // 2, narrow) if narrow else self.width // 2
        self.body.widths.add(self.width)

    def _plain(self) -> str:
        self.take_half_the_lanes()
        k = self.kernel
        outer = list(k.outer)
        blocked = (
            self.is_map
            and len(k.inner) == 1
            and (type(self.size) is Size or self.size > BLOCK)
            and (elements(outer) < 32 or any(e.op == "rand" for e in self.exprs))
            and not self.scatters
        )
        free = frozenset(outer).intersection(
            *(determined(s.index) for s in self.scatters)
        )  # no two tasks write one place
        lead: list[Var] = []
        while outer and outer[0] in free and elements(lead) < 64:
            lead.append(outer.pop(0))
        names = self.vars
        row = CppScope(self.top, [*((v, names[v]) for v in k.outer), (ROW, "")])
        tasks = numel(v.size for v in lead)
        copied = self._copied(k.phases[0])
        block = BLOCK if copied is None else COPIED_BLOCK // copied.args[2].itemsize
        blocks: Dim = (self.size + block - 1) // block if blocked else 1
        size = self.number(self.size)
        self._row(row, ("lo", "hi") if blocked else None)
        head = (
            self.decode(f"(task/{self.number(blocks)})" if blocked else "task", lead, names) if lead else ""
        )
        if blocked:
            head += f"const i64 lo=task%{self.number(blocks)}*{block},hi=lo+{block}<{size}?lo+{block}:{size};"
        inside = "".join(row.lines)
        for v in reversed(outer):
            inside = loop(names[v], self.number(v.size), inside)
        inside = head + inside
        last = self._finish("1", {}) if k.final or k.final_once else ""
        if is_one(tasks * blocks):
            return f"{{const i64 task=0;{inside}}}{last}"
        return self.over("task", tasks * blocks, self.number(tasks * blocks), inside) + last

    def _with_across(self) -> str:
        """Rows in chunks, each chunk with accumulators of its own; then they are combined in order."""
        k = self.kernel
        rows = numel(v.size for v in k.outer)
        lanes = self.inner_count
        chunks, head = self.chunks(rows, 8, lanes * 8 * len(self.across))
        room, offset = "", "0"
        start, keep, places = [], [], {}
        for s, per_inner in self.across:
            n, long = self.number(lanes if per_inner else 1), loses(s) and hint(rows) > STRIP
            t, span = ctype(s.expr.dtype, 1), times("3" if long else "1", n)
            places[s.id] = (f"(acc{s.id}+{n})" if long else f"acc{s.id}", span, t)
            room += f"{t}*const acc{s.id}=({t}*)(room_+{offset});"
            offset = beyond(offset, times(chunks, span))
            first = reduce_start(s.kind, s.expr.dtype)
            start.append(
                f"{t}*const a{s.id}_=acc{s.id}+chunk*{span};for(i64 i=0;i<{span};i++)a{s.id}_[i]={first};"
            )
            keep += [f"keep_all<{ctype(s.expr.dtype, self.width)}>(a{s.id}_,{n});"] * long
        row = CppScope(self.top, [*((v, self.vars[v]) for v in k.outer), (ROW, "")])
        self._row(row, None)
        decode = self.decode("row", k.outer, self.vars) if k.outer else ""
        count = self.number(rows)
        inside = f"const i64 last=(chunk+1)*{count}/{chunks};for(i64 row=chunk*{count}/{chunks};row<last;){{"
        inside += f"const i64 until=row+{STRIP}<last?row+{STRIP}:last;"
        inside += f"for(;row<until;row++){{{decode}{''.join(row.lines)}}}{''.join(keep)}}}"
        tasks = int(chunks) if chunks.isdigit() else rows
        sums = self.over("chunk", tasks, chunks, "".join(start) + inside)
        return f"{head}char*room_=(char*)room({offset});{room}{sums}\n{self._finish(chunks, places)}"

    def _finish(self, chunks: str, places: dict[int, tuple[str, str, str]]) -> str:
        """Combine the chunks' accumulators, then the final statements over the inner loops, then those done
        once.
        """
        k = self.kernel
        position = row_major(k.inner)
        final = CppScope(self.top, [(FINAL, ""), (ONCE, "")])
        for s, per_inner in self.across:
            if not per_inner:
                name, span, t = places[s.id]
                self.add_chunks(s, t, f"{name}[0]", f"{name}[c_*{span}]", chunks, final, 1)

        def emit(scope: CppScope, copy: int | str) -> None:
            for s, per_inner in self.across:
                if per_inner:
                    self._combine_lane(s, chunks, places[s.id], position, scope)
            for last in k.final:
                self.store(of_kind(last, Store), scope)

        if k.final or any(per_inner for _, per_inner in self.across):
            self.nest(k.inner, final, emit, extra=[(FINAL, "")])
        for last in k.final_once:
            self.store(of_kind(last, Store), final)
        return "{" + "".join(final.lines) + "}"

    def _combine_lane(
        self, s: Reduce, chunks: str, place: tuple[str, str, str], position: Index, scope: CppScope
    ) -> None:
        name, n, _ = place
        t = ctype(s.expr.dtype, scope.width)
        at = self.body.index(position, scope)
        first, other = f"ld<{t}>({name}+{at})", f"ld<{t}>({name}+c_*{n}+{at})"
        self.add_chunks(s, t, first, other, chunks, scope, scope.width)

    # -- one row ---------------------------------------------------------------------------------------------
    def _row(self, row: CppScope, limits: tuple[str, str] | None) -> None:
        second = next((p for p in [p for p in self.kernel.phases if p.inner][1:]), None)
        for phase in self.kernel.phases:
            if phase.inner:
                self._phase(phase, row, limits, self._streams() if phase is second else [])
            for s in phase.row:
                if isinstance(s, Reduce):
                    value = self.body.value(s.expr, row)
                    row.lines.append(f"*a{s.id}_={COMBINE[s.kind].format(f'(*a{s.id}_)', value)};")
                else:
                    self.store(of_kind(s, Store), row)

    def _streams(self) -> list[Expr]:
        """Loads of the first pass that walk along the rows of large buffers.

        The second pass computes on a row that is in the cache already, so it has time to fetch the next one:
        softmax over 12×512×512 takes 0.72 of the time.
        """
        k = self.kernel
        if not k.outer or len(k.inner) != 1 or elements(k.outer) * hint(self.inner_count) < STREAMED:
            return []
        first = next(p for p in k.phases if p.inner)
        loads = [e for e in all_exprs(first.inner) if e.op == "load" and e.args[1].is_affine]
        steps = [(e, e.args[1].coefficient(k.inner[0]), e.args[1].terms.get(k.outer[-1], 0)) for e in loads]
        return [e for e, along, across in steps if is_one(along) and known(">=", across - k.inner[0].size)][
            :4
        ]

    def _fetch_ahead(self, loads: Sequence[Expr], scope: CppScope) -> None:
        for e in loads:
            buffer, index, _ = e.args
            ahead = self.body.index(index + index.coefficient(self.kernel.outer[-1]), scope)
            scope.lines.append(f"__builtin_prefetch({self.body.params[buffer]}+{ahead});")

    def _phase(
        self, phase: Phase, row: CppScope, limits: tuple[str, str] | None, ahead: Sequence[Expr]
    ) -> None:
        k = self.kernel
        source = self._copied(phase)
        if source is not None:
            self._copy(of_kind(phase.inner[0], Store), source, row, limits or ("0", self.number(self.size)))
            return
        self._prefill(phase, row, limits)
        for s in phase.inner:
            if isinstance(s, Scratch):
                t = ctype(s.expr.dtype, 1)
                self.body.scratch[s.id] = f"s{s.id}_"
                self._row_buffer(t, f"s{s.id}_", self.inner_count, row)
        phase, tracked = without_tracked(phase)
        reductions = [s for s in phase.inner if isinstance(s, Reduce) and not s.across]
        exprs = all_exprs(phase.inner)
        unroll = self._unroll(exprs, bool(reductions))
        step = unroll * self.width
        turns = [*(v.size for v in k.inner[:-1]), (self.size + step - 1) // step]
        self.strips = Strips([*zip(k.inner, turns, strict=False)])
        for s in reductions:
            self._declare(s, row, unroll)
        position = row_major(k.inner)

        def emit(scope: CppScope, copy: int | str) -> None:
            if scope.width > 1 and copy != "t":
                self._fetch_ahead(ahead, scope)
            for s in phase.inner:
                if isinstance(s, Store):
                    self.store(s, scope)
                elif isinstance(s, Scratch):
                    value = self.body.rounded(s.expr, scope, scope.width)
                    scope.lines.append(
                        f"st<{ctype(s.expr.dtype, 1)}>(s{s.id}_+{self.body.index(position, scope)},{value});"
                    )
                else:
                    self._gather(
                        of_kind(s, Reduce),
                        f"a{s.id}_{copy}" if scope.width > 1 else f"a{s.id}s",
                        position,
                        scope,
                    )

        self.nest(k.inner, row, emit, limits, unroll, before=functools.partial(self._begin, phase))
        row.lines.append(self.strips.end())
        self.strips = Strips(())
        for s in reductions:
            self._collect(s, row, unroll)
        for s, holder in tracked:
            self.complete(s, row, f"a{holder}s", 1)

    def _copied(self, phase: Phase) -> Expr | None:
        """The load of a pass that copies long runs of memory to others, in all more than fits in a core's own
        caches with ease: the C library does not read the memory that it is about to overwrite.
        """
        k, s = self.kernel, phase.inner[0]
        if (
            not self.is_map
            or not len(k.inner) == len(phase.inner) == 1
            or not isinstance(s, Store)
            or s.scatters
        ):
            return None
        e, run = s.expr, hint(self.size) * s.memory.itemsize
        while e.op == "round_to" and e.args[1] is s.memory:
            e = e.args[0]
        if (
            e.op != "load"
            or not _same_bits(e.args[2], s.memory)
            or run < RUN
            or run * elements(k.outer) < COPIED
        ):
            return None
        return e if all(is_one(i.coefficient(k.inner[0])) for i in (s.index, e.args[1])) else None

    def _copy(self, s: Store, source: Expr, row: CppScope, limits: tuple[str, str]) -> None:
        scope = CppScope(row, [(self.kernel.inner[0], limits[0])])
        self.stores.append((s, scope.bound.keys()))
        to = f"{self.names[s.buffer]}+{self.body.index(s.index, scope)}"
        start = f"{self.names[source.args[0]]}+{self.body.index(source.args[1], scope)}"
        row.lines += [*scope.lines, f"copy_({to},{start},{limits[1]}-{limits[0]});"]

    def _unroll(self, exprs: Sequence[Expr], reduces: bool) -> int:
        """Vectors in a turn of a loop: several where sums wait for one another, or the operations of one
        element, which are more than the processor looks ahead.
        """
        if self.width == 1 or hint(self.size) < 8 * self.width:
            return 1
        costs = [e.cost for e in exprs]
        if self.halved:  # such a loop is hardly longer than its own counting
            return 4
        waits = self.is_map and sum(costs) >= HEAVY_MAP and max(costs) < CALLED
        return 4 if len(exprs) <= (MOST_UNROLLED if reduces else MOST_UNROLLED * 2 * waits) else 1

    def _begin(self, phase: Phase, scope: CppScope) -> None:
        """The values of a block's statements, where none of these reads another's result."""
        stores = [s for s in phase.inner if isinstance(s, Store)]
        if {s.buffer for s in stores} & self.loaded and len(phase.inner) > 1:
            return
        for s in phase.inner:
            if isinstance(s, Store):
                self.stored(s, scope)
            else:
                self.body.value(s.expr, scope)

    def _row_buffer(self, t: str, name: str, count: Dim, row: CppScope) -> None:
        """Memory for a row of values: on the stack, or of the thread when its length is known only at the
        call.
        """
        if type(count) is int:
            row.lines.append(f"{t} {name}[{count}] __attribute__((aligned(64)));")
            return
        span = f"({self.number(count)}*8+63)/64*64"
        if not self.row_buffers:
            row.lines.append(f"char*const row_=(char*)row_room(@rows@*({span}));")
        row.lines.append(f"{t}*const {name}=({t}*)(row_+{self.row_buffers}*({span}));")
        self.row_buffers += 1

    def _across(self, s: Reduce, position: Index, scope: CppScope) -> None:
        t = ctype(s.expr.dtype, scope.width)
        at = f"a{s.id}_+{self.body.index(position, scope)}"
        value = self.body.operand(s.expr, scope, scope.width)
        scope.lines.append(
            f"st<{ctype(s.expr.dtype, 1)}>({at},{COMBINE[s.kind].format(f'ld<{t}>({at})', value)});"
        )

    def _accumulators(self, s: Reduce, unroll: int) -> dict[str, int]:
        """The names of a reduction's accumulators and their lanes, the one without lanes first."""
        names = {f"a{s.id}s": 1} if self._has_singles() or s.position is not None else {}
        if self.width > 1:
            names |= {f"a{s.id}_{u}": self.width for u in range(unroll)}
            if self.tail():
                names[f"a{s.id}_t"] = self.tail()
        return names

    def _has_singles(self) -> bool:
        """Whether elements of a row are left when vectors have gone through it."""
        return self.width == 1 or not divides(self.tail() or self.width, self.size)

    def _positions(self, s: Reduce) -> Positions:
        return Positions(s, self.kernel.inner, self.body)

    def _declare(self, s: Reduce, row: CppScope, unroll: int) -> None:
        for name, width in self._accumulators(s, unroll).items():
            if s.position is not None:
                row.lines.append(self._positions(s).declare(name, width))
                continue
            t, start = ctype(s.expr.dtype, width), reduce_start(s.kind, s.expr.dtype, width)
            kept = self.strips.declare(t, name) if loses(s) else ""
            row.lines.append(f"{t} {name}=bc<{t}>({start});{kept}")

    def _collect(self, s: Reduce, row: CppScope, unroll: int) -> None:
        """One number from the lanes' accumulators, known to the row from now on."""
        total = f"a{s.id}s"
        if s.position is not None:
            others = {n: width for n, width in self._accumulators(s, unroll).items() if n != total}
            row.lines.append(self._positions(s).join(total, others))
            result = self.body.fresh()
            row.lines.append(f"const i64 {result}={total}at;")
            self.complete(s, row, result, 1)
            return
        t = ctype(s.expr.dtype, 1)
        if self.width > 1:
            lanes = f"a{s.id}_0"
            for u in range(1, unroll):
                lanes = f"({COMBINE[s.kind].format(lanes, f'a{s.id}_{u}')})"
            lanes = f"{ACROSS_LANES[s.kind]}({lanes})"
            lanes = f"({t}){lanes}" if type(self.width) is NarrowLanes else lanes
            total = COMBINE[s.kind].format(total, lanes) if self._has_singles() else lanes
            if self.tail():
                total = COMBINE[s.kind].format(f"({total})", f"{ACROSS_LANES[s.kind]}(a{s.id}_t)")
        name = self.body.fresh()
        row.lines.append(f"const {t} {name}={total};")
        self.complete(s, row, name, 1)

    def _gather(self, s: Reduce, name: str, position: Index, scope: CppScope) -> None:
        if s.across:
            self._across(s, position, scope)
        elif s.position is not None:
            scope.lines.append(self._positions(s).track(name, scope))
        else:
            self.accumulate(s, name, scope)

    def _prefill(self, phase: Phase, row: CppScope, limits: tuple[str, str] | None) -> None:
        """Draw the random numbers of a row at once, when its elements have consecutive numbers."""
        k = self.kernel
        if not k.inner:
            return
        low = limits[0] if limits else "0"
        count = BLOCK if limits else self.inner_count
        strides = contiguous_stride([v.size for v in k.inner])
        for e in all_exprs(phase.inner):
            if e.op != "rand" or e in self.body.prefilled or type(count) is int and count > 16384:
                continue
            linear: Index = e.args[2]
            steps = [linear.coefficient(v) for v in k.inner]
            if any(step is None or not equal(step, s) for step, s in zip(steps, strides, strict=True)):
                continue
            if any(a.dtype is not torch.int64 for a in e.args[:1]) or e.args[0].vars:
                continue
            name = self.body.fresh()
            base = CppScope(row, [(v, low if v is k.inner[-1] else "0") for v in k.inner])
            seed = self.body.value(e.args[0], row)
            length = f"{limits[1]}-{low}" if limits else self.number(count)
            self._row_buffer("float", name, count, row)
            row.lines.append(
                f"philox_fill({name},{seed},{self.body.stream(e.args[1])},"
                f"{self.body.index(linear, base)},{length});"
            )
            self.body.random = True
            position = flatten([Index.of(v) for v in k.inner], strides)
            self.body.prefilled[e] = (f"{name}-{low}" if limits else name), position
