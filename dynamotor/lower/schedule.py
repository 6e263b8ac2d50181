"""From a group to a kernel: which results are stored, in which phase each is computed, in which order loops
nest.

The phase of an expression is how many row reductions have to be complete before it: softmax has the phases
max | exp, sum | multiply. Values needed again in a later phase are computed again, read back from where they
were stored, or kept in a row scratch, whichever is cheapest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch

from ..base.config import config
from ..graph.sizes import Dim, equal, hint
from ..graph.spec import HALVES, contiguous_stride
from .fusion import MAX_ACROSS, Group, Member, elements, fast_var
from .index_expr import Index, Var, flatten, row_major
from .ir import (
    COLS,
    COMPUTE_TYPE,
    FINAL,
    FULL,
    ROW,
    ROWS,
    SCAN,
    Expr,
    Kernel,
    Phase,
    Reduce,
    ReduceKind,
    ScanStatement,
    Scratch,
    Statement,
    Store,
    cast,
    changed,
    fits,
    load,
    loads_of,
    make,
    places,
    rewrite,
    rewrite_index,
    roots,
    round_to,
    walk,
)

RECOMPUTE_COST = 8  # up to this a value is computed again in a later phase rather than kept
MAX_SCRATCH = 1 << 19  # bytes of rows that are kept; they are on the stack


class _Builder:
    """Works one group out."""

    def __init__(self, group: Group, stored: Collection[str]) -> None:
        self.group = group
        self.stored = [m for m in group.members if m.node.buffer in stored]
        self.ids = {m.node.buffer: n for n, m in enumerate(group.members)}
        self.values: dict[str, Expr] = {}  # member -> its value as others see it
        self.exprs: dict[str, Expr] = {}  # member -> its expression (a reduction: its operand)
        self.places: dict[str, Index] = {}  # member -> where it stores
        self.levels: dict[Expr, int] = {}
        self.reduce_level: dict[int, int] = {}
        self.duplicates: set[str] = set()  # reductions that an earlier member computes already
        if stream_rows(group):
            group.template, group.loop = ROWS, group.big_vars - group.loop
        self.outer: list[Var] = []
        self.middle: list[Var] = []
        self.inner: list[Var] = []
        self.order()

    def order(self) -> None:
        """Choose the nesting: outermost first, the vector variable last."""
        g = self.group
        everything = [v for v in g.vars if not v.single]
        steps = _primary_steps(g)
        rank = {v: (-steps.get(v, 0), n) for n, v in enumerate(everything)}
        ordered = sorted(everything, key=lambda v: rank[v] if v in steps else (float("-inf"), rank[v][1]))
        fast = fast_var(g.members, g.big_vars)
        scatter = next((m for m in g.members if m.node.scatter is not None and m.node.in_order), None)
        if scatter is not None:
            self.inner = _row_major(scatter, everything)
        elif g.template is None:
            if fast is not None:
                ordered.remove(fast)
                ordered.append(fast)
            self.inner = ordered
        elif g.template == SCAN:
            first = next(m for m in g.members if m.node.scan is not None)
            along = first.env[first.node.own[first.node.along]]
            self.outer = [v for v in ordered if v not in g.loop]
            self.inner = sorted(g.loop, key=lambda v: -hint(along.terms[v]))
        elif g.template == ROWS:
            self.outer = [v for v in ordered if v not in g.loop]
            self.inner = _with_last([v for v in ordered if v in g.loop], fast_var(g.members, g.loop))
        else:
            kept = [v for v in ordered if v not in g.loop]
            last = max((ordered.index(v) for v in g.loop), default=-1)
            self.middle = [v for v in ordered if v in g.loop]
            self.inner = [v for v in kept if ordered.index(v) > last] or kept[-1:]
            self.outer = [v for v in kept if v not in self.inner]
            self.inner = _with_last(self.inner, fast_var(g.members, frozenset(self.inner)))

    def kept(self) -> Index:
        """Position among the loops over which across accumulators are kept."""
        return row_major(self.inner if self.group.template == ROWS else [*self.outer, *self.inner])

    # -- values ----------------------------------------------------------------------------------------------
    def resolve(self) -> None:
        """Replace loads of the group's own buffers by the values themselves."""
        memo: dict[Expr, Expr] = {}

        def leaf(e: Expr) -> Expr | None:
            if e.op == "round_to" and e.args[1] in HALVES:
                value = rewrite(e.args[0], leaf, memo=memo)
                return value if fits(value, e.args[1]) else make("round_to", (value, e.args[1]), e.dtype)
            return self.values.get(e.args[0]) if e.op == "load" else None

        done: list[Member] = []
        for m in self.group.members:
            e = rewrite(m.expr, leaf, memo=memo)
            name = m.node.buffer
            self.exprs[name] = e
            self.places[name] = rewrite_index(m.store, leaf, memo) if m.node.scatter is not None else m.store
            if m.is_reduction:
                rank = self.group.result_level(m)
                same = next((x for x in done if self._same_reduction(x, m, e)), None)
                if same is not None:
                    self.values[name] = self.values[same.node.buffer]
                    self.duplicates.add(name)
                    continue
                done.append(m)
                where = self.kept() if rank == FINAL else Index({}, 0)
                value = make("acc", (self.ids[name], rank, where), COMPUTE_TYPE[m.node.memory])
                if rank == ROW:
                    self.reduce_level[self.ids[name]] = self.level(e)
            elif m.node.scan is not None:
                where = row_major([*self.outer, *self.inner])
                kept = torch.int64 if m.node.scan.startswith("arg") else e.dtype
                value = cast(make("scan", (self.ids[name], where), kept), COMPUTE_TYPE[m.node.memory])
            else:
                value = e
            half = m.node.memory in HALVES
            gathered = m.is_reduction or m.node.scan is not None
            if config.exact or gathered and not half:  # narrow integers wrap; maps of them say so themselves
                value = round_to(value, m.node.memory)
            elif (
                half and m in self.stored
            ):  # what others read, in this graph or in the backward, is read here too
                value = make("round_to", (value, m.node.memory), value.dtype)
            self.values[name] = value
            for cached in [c for c in memo if c.op == "load" and c.args[0] == name]:
                del memo[cached]

    def _same_reduction(self, a: Member, b: Member, e: Expr) -> bool:
        """Whether member a already computes what b (reducing e) would."""
        x, y = a.node, b.node
        return (
            x.reduce == y.reduce
            and not x.gives_position
            and x.memory is y.memory
            and self.exprs[x.buffer] is e
            and a.reduced == b.reduced
        )

    def level(self, e: Expr) -> int:
        """How many row reductions must be complete before e: the phase in which it can be computed."""
        found = self.levels.get(e)
        if found is None:
            if e.op == "acc":
                found = self.reduce_level.get(e.args[0], -1) + 1
            else:
                found = max((self.level(c) for c in e.children), default=0)
            self.levels[e] = found
        return found

    # -- statements ------------------------------------------------------------------------------------------
    def build(self) -> Kernel:
        self.resolve()
        inner: dict[int, list[Statement]] = {}
        row: dict[int, list[Statement]] = {}
        final: list[Statement] = []
        once: list[Statement] = []
        for m in self.group.members:
            if m.node.reduce is not None and m.node.buffer not in self.duplicates:
                self._reduction(m, m.node.reduce, inner, row)
            elif m.node.scan is not None:
                name, place = m.node.buffer, m.env[m.node.own[m.node.along]]
                inner.setdefault(0, []).append(
                    ScanStatement(self.ids[name], m.node.scan, self.exprs[name], place)
                )
        for m in self.stored:
            name, over = m.node.buffer, m.node.scatter is not None
            value = self.values[name]
            if value.op == "round_to" and value.args[1] is m.node.memory and not m.node.add:
                value = value.args[0]  # memory rounds
            store = Store(name, self.places[name], value, m.node.memory, m.node.add, over, m.node.part)
            where = self.group.result_level(m)
            if where == FULL:
                inner.setdefault(max(map(self.level, roots(store))), []).append(store)
            elif where == ROW:
                row.setdefault(max(self.level(store.expr) - 1, 0), []).append(store)
            else:
                (final if where == FINAL else once).append(store)
        count = 1 + max([*inner, *row], default=0)
        phases = [Phase(tuple(inner.get(n, ())), tuple(row.get(n, ()))) for n in range(count)]
        if self.group.template == ROWS:
            phases = self._keep_for_later(phases)
        kernel = Kernel(
            self.group.template or ROWS,
            tuple(self.outer),
            tuple(self.middle),
            tuple(self.inner),
            tuple(phases),
            tuple(final),
            tuple(once),
        )
        kernel = merge_loops(kernel)
        if self.group.template is None:
            kernel = replace(kernel, outer=kernel.inner[:-1], inner=kernel.inner[-1:])
        return kernel.with_params()

    def _reduction(
        self, m: Member, kind: ReduceKind, inner: dict[int, list[Statement]], row: dict[int, list[Statement]]
    ) -> None:
        name = m.node.buffer
        number, e = self.ids[name], self.exprs[name]
        where = self.group.result_level(m)
        at = self.level(e)
        if where == ROW:
            position = None
            if m.node.gives_position:
                own = m.node.own[len(m.node.shape) :]
                position = flatten([m.env[v] for v in own], contiguous_stride([v.size for v in own]))
            inner.setdefault(at, []).append(Reduce(number, kind, e, position))
        elif where == FINAL:
            inner.setdefault(at, []).append(Reduce(number, kind, e, across=True))
        elif self.group.loop == self.group.big_vars:
            inner.setdefault(at, []).append(Reduce(number, kind, e))
        else:
            part = len(self.group.members) + number
            inner.setdefault(at, []).append(Reduce(part, kind, e))
            row.setdefault(at, []).append(
                Reduce(number, kind, make("acc", (part, ROW, Index({}, 0)), e.dtype), across=True)
            )

    def _cost_in_row(self, value: Expr) -> int:
        """What computing it again for each element of a row costs."""
        inner = frozenset(self.inner)
        return sum(e.cost + (e.op == "load") for e in walk(value) if e.vars & inner)

    # -- values needed in several phases ---------------------------------------------------------------------
    def _keep_for_later(self, phases: list[Phase]) -> list[Phase]:
        """Decide for each member's value used in later phases: compute again, read back, or scratch."""
        if len(phases) < 2:
            return phases
        replacement: dict[Expr, Expr] = {}
        extra: dict[int, list[Statement]] = {}
        stored = {m.node.buffer for m in self.stored}
        position = row_major(self.inner)
        uses = [set(walk(*roots(*p.inner))) for p in phases]
        for m in self.group.members:
            value = self.values[m.node.buffer]
            if (
                m.is_reduction
                or m.level != FULL
                or value in replacement
                or value.op in ("load", "const", "acc")
            ):
                continue
            first = self.level(value)
            if (
                not any(value in used for used in uses[first + 1 :])
                or self._cost_in_row(value) <= RECOMPUTE_COST
            ):
                continue
            if m.node.buffer in stored and m.node.memory is COMPUTE_TYPE.get(m.node.memory):
                replacement[value] = load(m.node.buffer, m.store, m.node.memory)
            elif (len(replacement) + 1) * elements(self.inner) * value.dtype.itemsize <= MAX_SCRATCH:
                number = len(replacement)
                replacement[value] = make("scratch", (number, position), value.dtype)
                extra.setdefault(first, []).append(Scratch(number, value))
        if not replacement:
            return phases
        result = []
        for n, phase in enumerate(phases):
            later = {v: r for v, r in replacement.items() if self.level(v) < n}
            memo: dict[Expr, Expr] = {}

            def swap(
                s: Statement, later: dict[Expr, Expr] = later, memo: dict[Expr, Expr] = memo
            ) -> Statement:
                return changed(s, lambda e: rewrite(e, later.get, memo=memo))

            result.append(Phase(tuple(swap(s) for s in (*extra.get(n, ()), *phase.inner)), phase.row))
        return result


def stream_rows(group: Group) -> bool:
    """Whether column sums go row by row with the sums in memory (near at hand in L1) rather than column block
    by column block: when elements are stored on the way or cost much, and rows are long."""
    if group.template != COLS:
        return False
    kept = group.big_vars - group.loop
    columns = elements(kept)
    if not 256 <= columns <= MAX_ACROSS or elements(group.loop) < 16:
        return False
    full = [m for m in group.members if m.level == FULL]
    stores = any(
        not m.is_reduction and all(i.coefficient(v) is not None for v in kept for i in [m.store])
        for m in full
    )
    return stores and fast_var(group.members, kept) in kept


def _row_major(m: Member, everything: list[Var]) -> list[Var]:
    """The variables of the nest in the order of the member's own loops."""
    ordered: list[Var] = []
    for own in m.node.own:
        digits = m.env[own].terms
        ordered += sorted((v for v in everything if v in digits), key=lambda v: -hint(digits[v]))
    return ordered


def _with_last(variables: list[Var], last: Var | None) -> list[Var]:
    if last in variables:
        variables.remove(last)
        variables.append(last)
    return variables


def _primary_steps(group: Group) -> dict[Var, int]:
    """Strides of the access that decides the loop order: the widest store, or the widest load."""
    best: Index | None = None
    for m in group.members:
        if not m.is_reduction and (best is None or len(m.store.vars()) > len(best.vars())):
            best = m.store
    for m in group.members:
        for e in loads_of(m.expr):
            index = e.args[1]
            if index.is_affine and (best is None or len(index.vars()) > len(best.vars())):
                best = index
    if best is None:
        return {}
    steps = {v: best.coefficient(v) for v in best.vars()}
    return {v: abs(hint(step)) for v, step in steps.items() if step is not None and hint(step)}


# -- merging loops -------------------------------------------------------------------------------------------
def merge_loops(kernel: Kernel) -> Kernel:
    """Make one loop of two neighbours when every index steps evenly through both."""
    for part in ("outer", "middle", "inner"):
        loops: list[Var] = list(getattr(kernel, part))
        at, used = len(loops) - 1, None
        while at > 0:
            high, low = loops[at - 1], loops[at]
            used = used or dict.fromkeys(i for s in kernel.statements() for i in _indices(s))
            if all(_even(i, high, low) for i in used):
                merged = Var(f"{high.name}{low.name}", high.size * low.size)
                env = {high: Index({}, 0), low: Index.of(merged)}
                loops[at - 1 : at + 1] = [merged]
                kernel, used = over_loops(kernel, env, **{part: tuple(loops)}), None
            at -= 1
    return kernel


def _indices(s: Statement) -> Iterable[Index]:
    yield from places(s).values()
    for e in walk(*roots(s)):
        yield from e.indices()


def _even(index: Index, high: Var, low: Var) -> bool:
    from_atoms = True
    for atom in index.terms:
        base = getattr(atom, "base", None)
        if base is not None:
            from_atoms = from_atoms and _even(base, high, low)
    return from_atoms and equal(index.terms.get(high, 0), index.terms.get(low, 0) * low.size)


def over_loops(kernel: Kernel, env: dict[Var, Index], **loops: tuple[Var, ...]) -> Kernel:
    """The kernel over other loops, with the variables that are gone replaced in all statements."""

    def swap(s: Statement) -> Statement:
        return changed(s, lambda e: e.subst(env), lambda i: i.subst(env))

    return kernel.changed(lambda statements: map(swap, statements), **loops)


def build_kernel(group: Group, stored: Collection[str]) -> Kernel:
    """The kernel of a group; `stored`: the buffers that are read outside of it."""
    return _Builder(group, stored).build()


def in_place_pairs(kernel: Kernel, sizes: dict[str, tuple[Dim, torch.dtype]]) -> tuple[tuple[str, str], ...]:
    """(written, read) buffers that may share memory: same size, and every read happens at the index of the
    store, no later than the store. Only in kernels that compute each element on its own."""
    if (
        kernel.template != ROWS
        or len(kernel.phases) > 1
        or any(isinstance(s, Reduce) for s in kernel.statements())
    ):
        return ()
    stores = [s for s in kernel.phases[0].inner if isinstance(s, Store)]
    reads: dict[str, set[Index]] = {}
    for s in stores:
        for e in (e for root in roots(s) for e in loads_of(root)):
            reads.setdefault(e.args[0], set()).add(e.args[1])
    pairs = []
    for s in stores:
        for name, indices in reads.items():
            same_size = name in sizes and equal(sizes[name], sizes[s.buffer])
            if indices == {s.index} and not (s.scatters or s.part) and same_size and len(stores) == 1:
                pairs.append((s.buffer, name))
    return tuple(pairs)
