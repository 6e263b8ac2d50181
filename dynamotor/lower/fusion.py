"""Fusion: nodes join groups that become one kernel each. Every rule returns None (fits) or a Refuse with its
reason.

A node is a loop that stores a buffer. A map that is cheap or has one reader stores nothing (`realize.py`):
it is part of each reader's expression, and no rule sees it. A group is a nest of loop variables and its
members' expressions over them. A node joins a group if its own variables can be expressed by those of the
nest (`space.match`), such that it reads results of the group only at the element just computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..base.events import emit, listening
from ..graph.sizes import Dim, Size, divides, equal, hint
from .index_expr import Index, Var, is_one
from .ir import (
    COLS,
    FINAL,
    FULL,
    ONCE,
    ROW,
    ROWS,
    SCAN,
    Expr,
    ExternNode,
    Level,
    LoopNode,
    Template,
    loaded_exprs,
    loads_of,
    total_cost,
)
from .space import Env, Split, match

MAX_PARAMS = 24
MERGED_PARAMS = 40  # of two groups that become one: most are values that one makes for the other
MAX_MEMBERS = 40
FAR = 8  # extern calls over which a value that is made again for the backward may move to the front
MAX_CHAIN = 400  # operations of which each needs the result of the one before
SUMS_TOGETHER = 1 << 23  # elements from which on sums of one row share a kernel; smaller ones share a launch
MAX_ACROSS = 16384  # elements of a per-thread partial result
LIGHT_COST = 6  # of a map that may run one element at a time; costlier ones need vectors


@dataclass(frozen=True, slots=True)
class Refuse:
    """Why a node does not join a group."""

    reason: str


@dataclass(eq=False, slots=True)
class Member:
    """A node in a group, with its expression `expr` and the index `store` at which it stores, both over the
    group's variables. `env` maps the node's own variables to these.

    level: how often it is computed. reduced: the variables that it reduces, or scans along.
    """

    node: LoopNode
    env: Env
    expr: Expr
    store: Index
    level: Level
    reduced: frozenset[Var] = frozenset()

    @property
    def is_reduction(self) -> bool:
        return self.node.reduce is not None

    def loads(self) -> list[Expr]:
        """Its reads from memory, for its value and for its place."""
        return [e for root in (self.expr, *loaded_exprs(self.store)) for e in loads_of(root)]


def elements(variables: Iterable[Var]) -> int:
    """Iterations of a nest of loops, at the call that is being compiled: for costs."""
    return math.prod([v.hint for v in variables])


class Group:
    """Nodes that become one kernel."""

    def __init__(self, number: int, most_params: int = MAX_PARAMS) -> None:
        self.number, self.most_params = number, most_params
        self.vars: list[Var] = []
        self.members: list[Member] = []
        self.by_buffer: dict[str, Member] = {}
        self.template: Template | None = None  # None while there is no reduction
        # rows: the variables reduced within a row; scan: those scanned along; cols: those summed over.
        self.loop: frozenset[Var] = frozenset()
        self._names = 0
        self._accesses: dict[str, list[Index]] | None = None

    # -- variables -------------------------------------------------------------------------------------------
    def new_var(self, size: Dim) -> Var:
        self._names += 1
        return Var(f"t{self._names - 1}", size)

    def split(self, split: Split) -> Env:
        """Replace one variable by two in everything; gives the replacement."""
        at = self.vars.index(split.var)
        high, low = self.new_var(split.var.size // split.low), self.new_var(split.low)
        self.vars[at : at + 1] = [high, low]
        env = {split.var: Index.of(high) * split.low + Index.of(low)}

        def both(variables: frozenset[Var]) -> frozenset[Var]:
            return (variables - {split.var}) | {high, low} if split.var in variables else variables

        self.loop = both(self.loop)
        self._accesses = None
        for m in self.members:
            m.env = {v: i.subst(env) for v, i in m.env.items()}
            m.expr, m.store, m.reduced = m.expr.subst(env), m.store.subst(env), both(m.reduced)
        return env

    @property
    def big_vars(self) -> frozenset[Var]:
        return frozenset(v for v in self.vars if not v.single)

    @property
    def size(self) -> int:
        """Elements of the nest, at the call that is being compiled."""
        return elements(self.vars)

    # -- accesses --------------------------------------------------------------------------------------------
    def accesses(self) -> dict[str, list[Index]]:
        """For each buffer the distinct flat indices at which the group touches it, stores first."""
        if self._accesses is not None:
            return self._accesses
        found: dict[str, list[Index]] = {}
        for m in self.members:
            found.setdefault(m.node.buffer, []).append(m.store)
        for m in self.members:
            for e in m.loads():
                indices = found.setdefault(e.args[0], [])
                if e.args[1] not in indices:
                    indices.append(e.args[1])
        self._accesses = found
        return found

    def params(self) -> set[str]:
        return set(self.accesses())

    # -- joining ---------------------------------------------------------------------------------------------
    def start(self, node: LoopNode) -> None:
        """The first member: its own space is the nest."""
        env: Env = {}
        for v in node.own:
            t = self.new_var(v.size)
            self.vars.append(t)
            env[v] = Index.of(t)
        member = self.place(node, env)
        if isinstance(member, Refuse):
            raise AssertionError(member.reason)
        self.accept(member)

    def place(self, node: LoopNode, env: Env) -> Member | Refuse:
        """The member that the node would be under this mapping."""
        count = len(node.shape)
        kept = frozenset(v for own in node.own[:count] for v in env[own].vars())
        gone = node.own[count:] if node.scan is None else (node.own[node.along],)
        reduced = frozenset(v for own in gone for v in env[own].vars())
        expr = node.evaluate().subst(env)
        member = Member(node, env, expr, node.place.subst(env), FULL, reduced)
        used = kept | reduced
        if used == self.big_vars:
            return member
        if node.reduce is not None:
            return Refuse("a reduction of part of the nest")
        if self.template in (None, SCAN):
            return Refuse("smaller than the nest")
        rest = self.big_vars - self.loop
        if (
            self.template == ROWS
            and used == rest
            and not any(self.result_level(p) in (FINAL, ONCE) for p in self.producers(member))
        ):
            member.level = ROW
        elif used == (self.loop if self.template == ROWS else rest):
            member.level = FINAL
        elif not used:
            member.level = ONCE
        else:
            return Refuse("neither per row nor per column of the nest")
        return member

    def producers(self, member: Member) -> Iterable[Member]:
        """Members whose buffers it reads."""
        for name in {e.args[0] for e in member.loads()}:
            if name in self.by_buffer:
                yield self.by_buffer[name]

    def result_level(self, m: Member) -> Level:
        """The level at which a member's result can be read."""
        if not m.is_reduction:
            return m.level
        if self.template == COLS:
            return FINAL
        if m.reduced == self.loop:
            return ROW
        return ONCE if m.reduced == self.big_vars else FINAL

    def accept(self, member: Member) -> None:
        """Make it a member; a reduction may fix the group's template."""
        self.members.append(member)
        self._accesses = None
        self.by_buffer[member.node.buffer] = member
        if member.is_reduction:
            adopt_template(self, member)
        elif member.node.scan is not None:
            self.template, self.loop = SCAN, member.reduced


SHORT_STEP = 4  # elements between those that follow each other, most of which share a cache line


def fast_var(members: Sequence[Member], among: frozenset[Var]) -> Var | None:
    """The variable along which most memory accesses are contiguous, or take short steps; of two the one of
    stores, which cost more across the memory.
    """
    score: Counter[Var] = Counter()
    for m in members:
        for index, weight in [
            *((e.args[1], 4) for e in loads_of(m.expr)),
            (m.store, 9 if not m.is_reduction else 0),
        ]:
            if len(index.vars()) < 1:
                continue
            weight *= len(index.vars())
            for v in index.vars() & among:
                step = index.coefficient(v)
                if is_one(step):
                    score[v] += 2 * weight
                elif type(step) is int and 0 < abs(step) <= SHORT_STEP:
                    score[v] += weight
    return max(score, key=lambda v: (score[v], hint(v.size))) if score else None


def adopt_template(group: Group, m: Member) -> None:
    """Fix rows or cols when the first reduction joins (or a row reduction joins column sums)."""
    everything = group.big_vars
    if group.template == ROWS or (group.template == COLS and m.reduced == group.loop):
        return
    if group.template == COLS:
        group.template, group.loop = ROWS, m.reduced
        return
    fast = fast_var(group.members, everything) or (group.vars[-1] if group.vars else None)
    if m.node.gives_position:
        group.template, group.loop = ROWS, m.reduced
    elif m.reduced == everything:
        group.template = ROWS
        _choose_rows_of_total(group, fast)
    elif fast in m.reduced:
        group.template, group.loop = ROWS, m.reduced
    else:
        group.template, group.loop = COLS, m.reduced


def _choose_rows_of_total(group: Group, fast: Var | None) -> None:
    """A reduction to one number: the fastest variable is the row; a single long one is cut into rows."""
    everything = group.big_vars
    if fast is None or fast not in everything:
        fast = next((v for v in reversed(group.vars) if not v.single), None)
    if fast is not None and len(everything) > 1:
        inner = {fast}
        for v in reversed([v for v in group.vars if v in everything and v is not fast]):
            if elements(inner) * hint(v.size) > 8192 or len(inner) + 1 >= len(everything):
                break
            inner.add(v)
        group.loop = frozenset(inner)
        return
    low = (
        max((d for d in range(256, 4097) if divides(d, fast.size)), default=0)
        if fast and _has_factors(fast.size)
        else 0
    )
    if fast is not None and low and hint(fast.size) > 2 * low:
        position = group.vars.index(fast)
        group.split(Split(fast, low))
        group.loop = frozenset({group.vars[position + 1]})
    else:
        group.loop = everything


def _has_factors(n: Dim) -> bool:
    """Whether a size may be a multiple of large numbers whatever its symbols are."""
    return type(n) is not Size or all(abs(c) >= 256 for c in n.terms.values())


# -- rules ---------------------------------------------------------------------------------------------------
Rule = Callable[[Group, Member], Refuse | None]
RULES: list[Rule] = []


def rule(fn: Rule) -> Rule:
    """Add a fusion rule: called with a group that has members and the node that would join it.

    Rules run in the order of this file, and the first refusal counts.
    """
    RULES.append(fn)
    return fn


@rule
def same_elements(group: Group, m: Member) -> Refuse | None:
    """Its reads of the group must be of the element just computed, ready at its level."""
    ready = {FULL: (FULL, ROW), ROW: (ROW,), FINAL: (FINAL,), ONCE: (ONCE,)}[m.level]
    for e in m.loads():
        producer = group.by_buffer.get(e.args[0])
        if producer is None:
            continue
        if e.args[1] != producer.store:
            return Refuse(f"reads another element of {e.args[0]}")
        if e.args[2] is not producer.node.memory:
            return Refuse(f"reads {e.args[0]} as another dtype")
        level = group.result_level(producer)
        if level not in ready and not (level == ONCE and m.level == FINAL):
            return Refuse(f"{e.args[0]} is complete only after the nest")
    return None


@rule
def fits_template(group: Group, m: Member) -> Refuse | None:
    """A reduction must reduce the inner loops, the other loops, or all of them."""
    if not m.is_reduction or group.template in (None, SCAN):
        return None
    everything = group.big_vars
    if group.template == COLS:
        if (
            m.reduced == group.loop
            or m.reduced == everything - group.loop
            and elements(m.reduced) <= MAX_ACROSS
            and _only_inner_columns(group, m)
        ):
            return None
        return Refuse("reduces other dimensions than the group's column sums")
    if m.reduced == group.loop:
        return None
    if m.reduced == everything - group.loop:
        return (
            None if elements(group.loop) <= MAX_ACROSS else Refuse("the partial results would be too large")
        )
    return (
        None
        if m.reduced == everything and group.loop != everything
        else Refuse("reduces other dimensions than the rows")
    )


def _only_inner_columns(group: Group, m: Member) -> bool:
    """Whether column sums may become the across sums of a rows group."""
    return all(x.level == FULL for x in group.members) and not m.node.gives_position


@rule
def sums_run_along_memory(group: Group, m: Member) -> Refuse | None:
    """Sums across rows must not read memory along these sums: each row would touch a cache line an element
    (the weights of the second of two products of a row, `down(up(x))`).
    """
    across = m.is_reduction and group.template == ROWS and m.reduced == group.big_vars - group.loop
    for e in m.loads() if across else ():
        index = e.args[1]
        crosses = index.vars() >= m.reduced and not any(is_one(index.coefficient(v)) for v in group.loop)
        if crosses and index.vars() & group.loop and any(is_one(index.coefficient(v)) for v in m.reduced):
            return Refuse(f"sums along {e.args[0]}, and the rows cross it")
    return None


@rule
def bytes_run_along_rows(group: Group, m: Member) -> Refuse | None:
    """Bytes that a kernel of row sums stored across its rows would be written one by one; a map of its own
    goes through tiles (float8 for the backward, which wants the other order of dimensions).
    """
    if group.template not in (None, ROWS) or group.template is None and not m.is_reduction:
        return None
    loop = m.reduced if group.template is None else group.loop
    for x in (*group.members, m):
        place = x.store
        if x.is_reduction or x.node.memory is not torch.uint8 or not place.vars() & loop:
            continue
        if not any(is_one(place.coefficient(v)) for v in loop) and any(
            is_one(place.coefficient(v)) for v in place.vars() - loop
        ):
            return Refuse(f"stores the bytes of {x.node.buffer} across the rows")
    return None


@rule
def beside_the_nest(group: Group, m: Member) -> Refuse | None:
    """Refuse a statement after the nest that needs none of its sums: a kernel of its own runs it in
    parallel."""
    if m.level in (FULL, ROW) or any(group.result_level(p) in (FINAL, ONCE) for p in group.producers(m)):
        return None
    return Refuse("waits for nothing that the nest sums up")


@rule
def scans_alone(group: Group, m: Member) -> Refuse | None:
    """A kernel of running sums has no reductions, and all of its scans run along the same variables in the
    same order.
    """
    if m.is_reduction:
        return Refuse("a reduction beside a scan") if group.template == SCAN else None
    if m.node.scan is None or group.template is None:
        return None
    others = [x.env[x.node.own[x.node.along]] for x in group.members if x.node.scan is not None]
    return (
        None
        if others and others[0] == m.env[m.node.own[m.node.along]]
        else Refuse("scans along another dimension")
    )


@rule
def light_maps_beside_a_serial_scan(group: Group, m: Member) -> Refuse | None:
    """A scan in C++ goes through its row one element at a time, and with it all maps of its kernel. Costly
    maps have vectors in a kernel of their own, which are worth the memory traffic.
    """
    members = [*group.members, m]
    if not any(x.node.serial for x in members):
        return None
    costly = any(x.node.scan is None and total_cost(x.expr) > LIGHT_COST for x in members)
    return Refuse("a costly map beside a scan, which has no vectors") if costly else None


@rule
def one_scatter(group: Group, m: Member) -> Refuse | None:
    """A kernel scatters once and each element in one place; in order only where nothing else decides the
    order of loops.
    """
    scatters = [x for x in group.members if x.node.scatter is not None]
    if m.node.scatter is None:
        return (
            Refuse("a reduction or scan beside a scatter")
            if scatters and (m.is_reduction or m.node.scan)
            else None
        )
    if scatters:
        return Refuse("a second scatter")
    if m.level != FULL or group.template in (COLS, SCAN) or (m.node.in_order and group.template is not None):
        return Refuse("a scatter is not done once for each element of the nest")
    rows = all(x.reduced == group.loop for x in group.members if x.is_reduction)
    return None if rows else Refuse("a scatter beside sums across rows")


@rule
def no_positions_across(group: Group, m: Member) -> Refuse | None:
    """argmax and argmin keep two numbers; across rows only values are kept."""
    if m.is_reduction and m.node.gives_position and group.template is not None:
        if group.template == COLS or m.reduced != group.loop:
            return Refuse("a position across rows")
    return None


@rule
def size_limits(group: Group, m: Member) -> Refuse | None:
    """Kernels stay of a size that compiles fast and keeps its pointers in registers."""
    if len(group.members) >= MAX_MEMBERS:
        return Refuse("too many nodes")
    if len(group.params() | m.node.reads | {m.node.buffer}) > group.most_params:
        return Refuse("too many buffers")
    if _depth([*group.members, m]) > MAX_CHAIN:
        return Refuse("too many operations one behind the other")
    return None


def _depth(members: Iterable[Member]) -> int:
    """Operations on the longest way from a load to a value, through the nodes of a kernel."""
    depths: dict[str, int] = {}
    for m in members:
        before = max((depths.get(name, 0) for name in m.node.reads), default=0)
        depths[m.node.buffer] = before + m.node.evaluate().depth
    return max(depths.values())


@rule
def no_overwrite(group: Group, m: Member) -> Refuse | None:
    """A node that writes into an input must not share a kernel with another reader or writer of it."""
    for x in group.members:
        if m.node.buffer in x.node.reads or m.node.buffer == x.node.buffer:
            return Refuse(f"writes {m.node.buffer} while the group reads it")
        if x.node.buffer in m.node.reads and x.node.after:
            return Refuse(f"reads {x.node.buffer} after it was overwritten")
    return None


@rule
def same_phase(group: Group, m: Member) -> Refuse | None:
    """Nodes of a whole step's forward and backward do not share a kernel: it would compute in the forward the
    values that the backward is meant to rematerialise.
    """
    return None if group.members[0].node.phase == m.node.phase else Refuse("the other phase of the step")


def try_join(
    group: Group, node: LoopNode, rules: Sequence[Rule] = RULES, alike: bool = False
) -> Member | Refuse:
    """The member the node becomes in the group (not yet accepted), or why not. alike: it may join for the
    shape of its result alone.
    """
    touched = group.accesses()
    own = node.evaluate()
    candidates: list[tuple[Index, Index]] = []
    for e in sorted(loads_of(own), key=lambda e: -len(e.args[1].vars())):
        for index in touched.get(e.args[0], ()):
            candidates.append((index, e.args[1]))
    if alike and not candidates:
        shape = node.shape, node.stride
        same = (m for m in group.members if equal((m.node.shape, m.node.stride), shape))
        candidates = [(m.store, node.place) for m in same]
    refusal = Refuse("nothing in common")
    splits: list[
        Env
    ] = []  # a split stays when its candidate is refused: later candidates are rewritten by it
    for nest_index, own_index in sorted(candidates, key=lambda c: -len(c[0].vars()))[:6]:
        for replaced in splits:
            nest_index = nest_index.subst(replaced)
        for _ in range(6):
            env = match(nest_index, own_index, group.vars, node.own)
            if not isinstance(env, Split):
                break
            splits.append(group.split(env))
            nest_index = nest_index.subst(splits[-1])
        if not isinstance(env, dict):
            refusal = Refuse("different iteration space")
            continue
        member = group.place(node, env)
        if isinstance(member, Refuse):
            refusal = member
            continue
        refused = next((r for check in rules if (r := check(group, member)) is not None), None)
        if refused is None:
            return member
        refusal = refused
    return refusal


def replay(number: int, nodes: Sequence[LoopNode], rules: Sequence[Rule]) -> Group | Refuse:
    """One group of all these nodes (in an order in which they can be computed), or why not.

    A node that touches nothing of those before it may be read beside them by a later one.
    """
    group = Group(number, MERGED_PARAMS)
    group.start(nodes[0])
    for node in nodes[1:]:
        member = try_join(group, node, rules, alike=True)
        if isinstance(member, Refuse):
            return member
        group.accept(member)
    return group


def shares_enough(group: Group, node: LoopNode) -> bool:
    """Whether fusing with a group that it does not depend on saves memory traffic: a large read in common."""
    wide = {
        e.args[0] for e in loads_of(node.evaluate()) if elements(e.args[1].vars()) * 2 > elements(node.own)
    }
    return bool(wide & group.params()) or _sums_alike(group, node)


def _sums_alike(group: Group, node: LoopNode) -> bool:
    """Whether both are large sums of the same shape over products with one row (a gate and its operand):
    one kernel reads the row once, and their readers find both sums there.
    """
    return (
        node.reduce == "sum"
        and group.template == ROWS
        and group.size == elements(node.own) >= SUMS_TOGETHER
        and any(m.node.reduce == "sum" and m.node.shape == node.shape for m in group.members)
    )


class Fuser:
    """Greedy fusion in program order, over a graph of groups and extern calls that stays without cycles."""

    def __init__(
        self, schedule: Sequence[LoopNode | ExternNode], overwritten: Collection[str], rules: Sequence[Rule]
    ) -> None:
        self.overwritten, self.rules = set(overwritten), rules  # names of inputs; the rules that may refuse
        self.items: list[Group | ExternNode | None] = []  # None: a group that became part of another
        self.owner: dict[str, int] = {}  # buffer -> item that made it last
        self.calls: list[int] = []  # for each item, how many extern calls come before it
        self.before: list[int] = []  # for each item a bit set of the items that must run before it
        self.readers: dict[str, int] = {}  # buffer -> bit set of items that read it
        self.schedule = schedule

    def run(self) -> list[Group | ExternNode]:
        """The items in an order in which they can run."""
        chain: int | None = None
        for entry in self.schedule:
            if isinstance(entry, ExternNode):
                at = self._append(
                    entry, self._dependencies(entry.reads, (*entry.makes, *entry.mutates), entry.after)
                )
                if chain is not None:
                    self._add_before(at, 1 << chain)
                chain = at
            else:
                self._place(entry)
        self._merge()
        return self._ordered()

    def _dependencies(self, reads: Iterable[str], writes: Iterable[str], after: Iterable[str]) -> int:
        direct = 0
        for name in (*reads, *after):
            if name in self.owner:
                direct |= 1 << self.owner[name]
        for name in writes:
            direct |= self.readers.get(name, 0)
        return direct

    def _closure(self, direct: int) -> int:
        total, rest = direct, direct
        while rest:
            low = rest & -rest
            total |= self.before[low.bit_length() - 1]
            rest ^= low
        return total

    def _append(self, item: Group | ExternNode, direct: int) -> int:
        at = len(self.items)
        self.calls.append(self.calls[-1] + isinstance(self.items[-1], ExternNode) if at else 0)
        self.items.append(item)
        self.before.append(self._closure(direct))
        self._note(
            at,
            item.reads if isinstance(item, ExternNode) else (),
            (*item.makes, *item.mutates) if isinstance(item, ExternNode) else (),
        )
        return at

    def _note(self, at: int, reads: Iterable[str], writes: Iterable[str]) -> None:
        for name in reads:
            self.readers[name] = self.readers.get(name, 0) | 1 << at
        for name in writes:
            self.owner[name] = at

    def _add_before(self, at: int, extra: int) -> None:
        extra = self._closure(extra) & ~(1 << at)
        self.before[at] |= extra
        for other in range(len(self.items)):
            if self.before[other] >> at & 1:
                self.before[other] |= self.before[at]

    def _place(self, node: LoopNode) -> None:
        node.evaluate()
        direct = self._dependencies(node.reads, (node.buffer,), node.after)
        for at, group in self._candidates(node):
            others = direct & ~(1 << at)
            if self._closure(others) >> at & 1:
                continue  # something that it needs runs after the group
            member = try_join(group, node, self.rules)
            if isinstance(member, Member):
                group.accept(member)
                self._add_before(at, others)
                self._note(at, node.reads, (node.buffer,))
                return
            if listening("refuse"):
                emit(
                    "refuse", node=node.origin, group=group.number, into=_origins(group), reason=member.reason
                )
        group = Group(len(self.items))
        at = self._append(group, direct)
        group.start(node)
        self._note(at, node.reads, (node.buffer,))

    def _candidates(self, node: LoopNode) -> list[tuple[int, Group]]:
        """Groups that a node may join, by position: those that made its operands, then those that read the
        same.
        """
        groups = {at: item for at, item in enumerate(self.items) if isinstance(item, Group)}
        made = {self.owner[b] for b in node.reads if self.owner.get(b) in groups}
        shared = 0
        for b in node.reads:
            shared |= self.readers.get(b, 0)
        nearby = [
            at
            for at, group in groups.items()
            if shared >> at & 1
            and at not in made
            and self._near(at, node, self.calls[-1])
            and shares_enough(group, node)
        ]
        return [(at, groups[at]) for at in sorted(made, reverse=True) + nearby[:-5:-1]]

    def _merge(self) -> None:
        """Make one group of two that touch the same large memory, when all members of both fit together."""
        position = {entry: n for n, entry in enumerate(self.schedule)}
        for b in range(len(self.items)):
            for a in self._partners(b):
                first, second = self.items[a], self.items[b]
                if not isinstance(first, Group) or not isinstance(second, Group):
                    continue
                if not self._adjacent(a, b) or not self._near(a, second.members[0].node, self.calls[b]):
                    continue
                nodes = sorted((m.node for m in (*first.members, *second.members)), key=position.__getitem__)
                merged = replay(a, nodes, self.rules)
                if isinstance(merged, Refuse):
                    if listening("refuse"):
                        emit(
                            "refuse",
                            group=a,
                            other=b,
                            node=_origins(second),
                            into=_origins(first),
                            reason=merged.reason,
                        )
                    continue
                self.items[a], self.items[b] = merged, None
                self._redirect(b, a)
                break

    def _partners(self, b: int) -> list[int]:
        """Groups that share a large buffer with group b, nearest first."""
        group = self.items[b]
        if not isinstance(group, Group):
            return []
        found = set()
        for name, indices in group.accesses().items():
            if max(elements(i.vars()) for i in indices) * 2 > group.size:
                bits = self.readers.get(name, 0) | (1 << self.owner[name] if name in self.owner else 0)
                found |= {at for at in range(b) if bits >> at & 1}
        return sorted(found, reverse=True)[:6]

    def _adjacent(self, a: int, b: int) -> bool:
        """Whether nothing else has to run between the two."""
        if self.before[a] >> b & 1:
            return self._adjacent(b, a)
        between = self.before[b] & ~(1 << a)
        return not any(between >> x & 1 and self.before[x] >> a & 1 for x in range(len(self.items)))

    def _near(self, at: int, node: LoopNode, calls: int) -> bool:
        """Whether a node behind so many extern calls may move to a group: a value that is made again for the
        backward is not made long before it is needed, where it would take memory meanwhile.
        """
        return node.phase != "backward" or calls - self.calls[at] <= FAR

    def _redirect(self, old: int, new: int) -> None:
        """Item `old` has become part of item `new`."""
        gone, bit = 1 << old, 1 << new
        self.before[new] = (self.before[new] | self.before[old]) & ~(bit | gone)
        for at, mask in enumerate(self.before):
            if mask & (gone | bit) and at != new:
                self.before[at] = (mask & ~gone) | bit | self.before[new]
        self.owner = {name: new if at == old else at for name, at in self.owner.items()}
        self.readers = {
            name: (mask & ~gone) | bit if mask & gone else mask for name, mask in self.readers.items()
        }

    def _ordered(self) -> list[Group | ExternNode]:
        """In program order, each item behind those that it needs. Writes to inputs run as soon as they can:
        their operands (gradients) are free then.
        """
        done = 0
        order: list[Group | ExternNode] = []
        left = {at: item for at, item in enumerate(self.items) if item is not None}
        early = [at for at, item in left.items() if isinstance(item, Group) and self._is_update(item)]
        for at in [at for at in left if at not in set(early)] + early:
            while at in left:
                ready = next((i for i in early if i in left and not self.before[i] & ~done), None)
                chosen = self._first_needed(at, done) if ready is None else ready
                done |= 1 << chosen
                order.append(left.pop(chosen))
        return order

    def _first_needed(self, at: int, done: int) -> int:
        """The first item that one needs and that can run now; itself where it needs no other."""
        missing = self.before[at] & ~done
        while missing:
            bit = missing & -missing
            if not self.before[bit.bit_length() - 1] & ~done:
                return bit.bit_length() - 1
            missing ^= bit
        return at

    def _is_update(self, group: Group) -> bool:
        """Whether all that a group makes is new contents of inputs, or is copied into one by another."""
        made = {member.node.buffer for member in group.members}
        readers = 0
        for name in made - self.overwritten:
            readers |= self.readers.get(name, 0) & ~(1 << self.owner[name])
        return bool(made & self.overwritten) and all(
            isinstance(other := self.items[at], Group)
            and {m.node.buffer for m in other.members} <= self.overwritten
            for at in range(len(self.items))
            if readers >> at & 1
        )


def _origins(group: Group) -> str:
    return ", ".join(dict.fromkeys(m.node.origin for m in group.members))


def fuse(
    schedule: Sequence[LoopNode | ExternNode],
    overwritten: Collection[str] = (),
    rules: Sequence[Rule] = RULES,
) -> list[Group | ExternNode]:
    """Group the loop nodes; gives groups and extern calls in an order in which they can run. `overwritten`:
    inputs that the schedule writes.
    """
    return Fuser(schedule, overwritten, rules).run()
