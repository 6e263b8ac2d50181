"""Writes into memory that holds values already: a functional update takes over the memory of the value that
it updates, where nothing reads the old value afterwards.

Lowering keeps every value under a name of its own. `claim` copies the whole memory of a value to a buffer
with the same layout, and the update writes into that buffer. `share_memory` looks at the finished schedule
and drops each copy that is not needed: the two names become one. `verify_in_place` proves on the order in
which kernels run that no read of a name comes after its memory got another one's contents.

    buf0 = copy of arg0             # claim
    buf0[p[i], j] = x[i, j]         # the update     ->    arg0[p[i], j] = x[i, j]
    arg0 = buf0                     # the new contents of the input
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ..base.events import emit
from ..graph.sizes import hint
from ..graph.spec import aten
from .claim import same_place
from .extern import may_alias
from .fusion import Group
from .ir import Expr, ExternNode, LoopNode, load, loaded_exprs, loads_of, rewrite, rewrite_index
from .program import BufRef
from .realize import Realizer
from .verify_program import wrong

Entry = LoopNode | ExternNode


# -- the finished schedule -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Touched:
    """The values that one entry reads and makes. New contents of an input are a value with a name of its
    own.
    """

    reads: frozenset[str]
    writes: tuple[str, ...]


@dataclass
class Sharing:
    """Which values share memory; what each entry of the schedule touched before they did, by its id; which
    value each memory holds at the end.
    """

    home: dict[str, str]
    accesses: dict[int, Touched]
    entries: tuple[Entry, ...]  # keeps the ids
    last: dict[str, str] = field(default_factory=dict)

    def memory(self, name: str) -> str:
        """The name of the memory that holds a value."""
        return self.home.get(name, name)

    def renamed(self, value: Any) -> Any:
        """A view of a value as a view of its memory."""
        return replace(value, name=self.memory(value.name)) if isinstance(value, BufRef) else value

    def lasts(self, name: str) -> bool:
        """Whether the memory holds this value at the end."""
        memory = self.memory(name)
        return self.last.get(memory, memory) == name


def share_memory(
    ctx: Realizer, schedule: Sequence[Entry], returned: Collection[str]
) -> tuple[list[Entry], Sharing]:
    """The schedule without those copies after which nothing reads the old contents, and which names share
    memory then.
    """
    left, mutated = list(schedule), set(ctx.mutated)
    sharing = Sharing(
        {new_contents(name): name for name in mutated},
        {id(entry): _access(entry, mutated) for entry in schedule},
        tuple(schedule),
    )
    for new, old in ctx.claimed.items():
        copy = ctx.copies[new]
        if id(copy) not in sharing.accesses:  # nothing reads it, or it is empty
            continue
        rest = [entry for entry in left if entry is not copy]
        trial = replace(sharing, home=sharing.home | {new: sharing.memory(old)})
        why = _why_stale(ctx, rest, trial, returned)
        if why is None:
            sharing, left = trial, rest
        else:
            _say_kept(ctx, copy, new, why)
    left = [entry for entry in left if not _stores_what_is_there(entry, sharing)]
    for entry in left:
        _rename(entry, sharing.home)
    for entry in left:
        sharing.last |= {sharing.memory(name): name for name in sharing.accesses[id(entry)].writes}
    return left, sharing


def new_contents(name: str) -> str:
    """The name of the value that an input has at the end."""
    return f"new {name}"


def _access(entry: Entry, mutated: Collection[str]) -> Touched:
    """The buffers that an entry touches while every value has memory of its own."""
    if isinstance(entry, LoopNode):
        entry.evaluate()
        writes: tuple[str, ...] = (entry.buffer,)
        reads = entry.reads
    else:
        writes, reads = (*entry.makes, *entry.mutates), entry.reads
    return Touched(reads, tuple(new_contents(name) if name in mutated else name for name in writes))


def _say_kept(ctx: Realizer, copy: Entry, name: str, why: str) -> None:
    """Note that a copy stays: its bytes and the reason."""
    spec = ctx.buffers[name].spec
    nbytes = hint(spec.extent) * spec.dtype.itemsize
    emit("copy", name=ctx.info.name, buffer=name, nbytes=nbytes, reason=why)
    if isinstance(copy, LoopNode):
        copy.origin += f" ({nbytes} bytes; {why})"


def _why_stale(
    ctx: Realizer, schedule: Sequence[Entry], sharing: Sharing, returned: Collection[str]
) -> str | None:
    """Which use of a value would find the contents of a later one; None where none does."""
    holds: dict[str, str] = {}  # memory -> its value
    shown: dict[str, frozenset[str]] = {}  # results of calls that may be views -> of which values
    for entry in schedule:
        access = sharing.accesses[id(entry)]
        written = {sharing.memory(name) for name in access.writes}
        for name in access.reads.union(*(shown.get(name, ()) for name in access.reads)):
            memory = sharing.memory(name)
            if holds.get(memory, memory) != name and name not in access.writes:
                return f"{_origin(entry)} reads the old value later"
            if memory in written and name not in access.writes and not _reads_own_places(entry, name):
                return f"{_origin(entry)} reads the old value in other places than it writes"
        if isinstance(entry, ExternNode) and may_alias(entry.step.target):
            names = entry.reads.union(*(shown.get(name, ()) for name in entry.reads))
            shown |= dict.fromkeys(entry.makes, names)
        if not _stores_what_is_there(entry, sharing):
            holds |= {sharing.memory(name): name for name in access.writes}
    for name in returned:
        memory = sharing.memory(name)
        if holds.get(memory, memory) != name:
            return "the old value is returned"
        if memory != name and ctx.buffers[memory].kind == "input":
            return "the new value is returned in memory of its own"
    viewed = shown.keys() & set(sharing.home.values())
    return f"{min(viewed)} may be a view of other memory" if viewed else None


def _origin(entry: Entry) -> str:
    return entry.origin if isinstance(entry, LoopNode) else str(entry.step.target)


def _reads_own_places(entry: Entry, name: str) -> bool:
    """Whether an entry reads this value only at the element that it stores then, or where it stores none."""
    if isinstance(entry, ExternNode) or entry.scatter is not None or entry.reduce or entry.scan:
        return False
    assert entry.expr is not None
    loads = [e for root in (entry.expr, *loaded_exprs(entry.place)) for e in loads_of(root)]
    places = [e.args[1] for e in loads if e.args[0] == name]
    return all(place == entry.place or not place.meets(entry.place) for place in places)


def _stores_what_is_there(entry: Entry, sharing: Sharing) -> bool:
    """Whether an entry gives memory the value that it holds."""
    if isinstance(entry, ExternNode):
        if entry.step.target is not aten.copy_.default:
            return False
        target, source = map(sharing.renamed, entry.step.args)
        return bool(target.name == source.name and same_place(target, source))
    e = entry.expr
    while e is not None and e.op == "round_to":
        e = e.args[0]
    return (
        e is not None
        and e.op == "load"
        and (sharing.memory(e.args[0]), e.args[1]) == (sharing.memory(entry.buffer), entry.place)
        and not entry.add
    )


def _rename(entry: Entry, home: Mapping[str, str]) -> None:
    """Give an entry the names of memory in the place of those of values."""
    entry.after = frozenset(home.get(name, name) for name in entry.after)
    reads = frozenset(home.get(name, name) for name in entry.reads)
    if isinstance(entry, ExternNode):
        entry.mutates = tuple(home.get(name, name) for name in entry.mutates)
        if reads != entry.reads or entry.mutates != entry.step.mutates:
            args = fx.node.map_aggregate((entry.step.args, entry.step.kwargs), lambda a: _view_of(a, home))
            entry.step = replace(entry.step, args=args[0], kwargs=args[1], mutates=entry.mutates)
    else:
        memo: dict[Expr, Expr] = {}

        def leaf(e: Expr) -> Expr | None:
            if e.op != "load" or e.args[0] not in home:
                return None
            return load(home[e.args[0]], rewrite_index(e.args[1], leaf, memo), e.args[2])

        entry.buffer = home.get(entry.buffer, entry.buffer)
        if reads != entry.reads:
            assert entry.expr is not None
            entry.expr = rewrite(entry.expr, leaf, memo=memo)
            entry.place = rewrite_index(entry.place, leaf, memo)
    entry.reads = reads


def _view_of(value: Any, home: Mapping[str, str]) -> Any:
    return (
        replace(value, name=home[value.name]) if isinstance(value, BufRef) and value.name in home else value
    )


# -- the order in which kernels run --------------------------------------------------------------------------
def verify_in_place(items: Sequence[Group | ExternNode], sharing: Sharing, returned: Collection[str]) -> None:
    """Whoever reads a value finds its memory with the contents of that value, in the order in which kernels
    run.
    """
    holds: dict[str, str] = {}
    shared = {*sharing.home, *sharing.home.values()}
    for item in items:
        entries = [item] if isinstance(item, ExternNode) else [member.node for member in item.members]
        accesses = [sharing.accesses[id(entry)] for entry in entries]
        writes = [name for access in accesses for name in access.writes if name in shared]
        reads = {name for access in accesses for name in access.reads if name in shared}
        for name in reads.difference(writes):
            memory = sharing.memory(name)
            if holds.get(memory, memory) != name:
                found = holds.get(memory, memory)
                wrong(f"{name} is read when its memory holds {found}", [_origin(e) for e in entries])
        homes = [sharing.memory(name) for name in writes]
        if len(set(homes)) < len(homes):
            wrong(f"one kernel writes {writes}, which share memory", [_origin(e) for e in entries])
        holds |= dict(zip(homes, writes, strict=True))
    for name in shared.intersection(returned):
        found = holds.get(sharing.memory(name), sharing.memory(name))
        if found != name:
            wrong(f"{name} is returned when its memory holds {found}", sorted(shared))
