"""While a graph is lowered: new memory for updates, which may turn out to be the memory of the updated value.

`claim` copies the whole memory of a value to a buffer of the same layout, in which the update is made; where
nothing reads the old value later, `in_place.share_memory` drops the copy. Values that are computed on demand
from the old value, and small parts of it that are read later, are kept first.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from ..graph.kernel_checks import sees_twice
from ..graph.nodes import operand
from ..graph.sizes import Dim, equal, hint
from ..graph.spec import TensorSpec, aten, contiguous_stride, numel
from .index_expr import Index, Var, is_one
from .ir import LoopNode, loads_of
from .program import BufRef
from .realize import VIEW_OPS, Realizer
from .value import LoopValue

# Ops that give their first operand with the part replaced that a view of it shows.
WRITES_BACK = frozenset(
    (
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.diagonal_scatter.default,
        aten.as_strided_scatter.default,
    )
)
_VIEWS = frozenset((*VIEW_OPS, "diagonal", "as_strided", "unfold"))

# Updates of parts of their first operand, and aten's own form that writes into it.
IN_PLACE: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.index_reduce.default: aten.index_reduce_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter.reduce: aten.scatter_.reduce,
    aten.scatter.value_reduce: aten.scatter_.value_reduce,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.put.default: aten.put_.default,
}


def claim(ctx: Realizer, x: LoopValue) -> BufRef | None:
    """New memory for an update of x, which holds a copy of all that the memory of x does; None where x has no
    memory, or has to keep it.
    """
    ref = x.ref
    if ref is None or not claimable(ctx, x):
        return None
    old = ctx.buffers[ref.name]
    for part in _read_later(ctx, ref.name):
        part.become(ctx.copy(part, contiguous_stride(part.shape)))
    for node, value in list(_values(ctx)):
        if value.ref is None and _is_read_later(ctx, node) and _reads(ctx, value, ref.name):
            ctx.realize(value)
    whole = LoopValue(old.spec.shape, old.spec.dtype, ref=BufRef.whole(old))
    new = ctx.copy(whole, old.spec.stride)
    ctx.claimed[new.name], ctx.copies[new.name] = ref.name, ctx.schedule[-1]
    mine = replace(ref, name=new.name)
    ctx.within[new.name] = [mine]
    return mine


def claimable(ctx: Realizer, x: LoopValue) -> bool:
    """Whether x has memory that may be overwritten: at most half of it is read later."""
    ref = x.ref
    if ref is None or ref.dtype is not ctx.buffers[ref.name].spec.dtype or _overlaps(ref):
        return False
    root = ctx.buffers[memory_of(ctx.claimed, ref.name)]
    if root.kind == "const" or root.kind == "input" and root.name not in ctx.targets:
        return False
    later = sum(hint(numel(part.shape)) for part in _read_later(ctx, ref.name))
    size = hint(ctx.buffers[ref.name].spec.numel)
    return size > 0 and 2 * later <= size  # an empty input that is read later must stay the input


def _read_later(ctx: Realizer, name: str) -> list[LoopValue]:
    """The views of a buffer that calls behind the present one read."""
    return [value for node, value in _values(ctx) if _shows(value, name) and _is_read_later(ctx, node)]


def write_part(ctx: Realizer, x: LoopValue, part: LoopValue, source: LoopValue) -> LoopValue | None:
    """x with the elements replaced that `part`, a view of it, shows; None where it cannot be claimed.

    source: the new elements. They may be in their place already, where they are an update of that view.
    """
    there = part.ref  # of now: where it is read later, `claim` makes it the memory of a copy
    if x.ref is None or there is None or _overlaps(there):
        return None
    if _is_written(ctx, x.ref, there, source):
        assert source.ref is not None
        whole = replace(x.ref, name=source.ref.name)
        ctx.within[whole.name].append(whole)
        return LoopValue(x.shape, x.dtype, ref=whole)
    mine = claim(ctx, x)
    if mine is None:
        return None
    place = replace(there, name=mine.name)
    ctx.within[mine.name].append(place)
    source = apart(ctx, source, there)
    node = LoopNode(mine.name, source.shape, source.at, place.stride, place.dtype, offset=place.offset)
    node.part, node.after, node.origin = True, frozenset({mine.name}), str(ctx.node)
    ctx.add(node)
    return LoopValue(x.shape, x.dtype, ref=mine)


def apart(ctx: Realizer, source: LoopValue, place: BufRef | None) -> LoopValue:
    """New elements, computed before any is written where they read memory that is being written in other
    places than their own (`place`; None: in any).
    """
    index = tuple(Index.of(Var(f"p{d}", n)) for d, n in enumerate(source.shape))
    own = None if place is None else LoopValue(place.shape, place.dtype, ref=place).at(index)
    claimed = set(ctx.claimed.values())
    loads = (e for e in loads_of(source.at(index)) if e is not own and e.args[0] in claimed)
    if any(own is None or own.args[0] != e.args[0] or own.args[1].meets(e.args[1]) for e in loads):
        return LoopValue(source.shape, source.dtype, ref=ctx.copy(source, contiguous_stride(source.shape)))
    return source


def keep_apart(ctx: Realizer, index: LoopValue, x: LoopValue) -> LoopValue:
    """Positions at which x is written, computed before where they read the memory of x."""
    ctx.keep(index)
    if x.ref is None or not _reads(ctx, index, x.ref.name):
        return index
    return LoopValue(index.shape, index.dtype, ref=ctx.copy(index, contiguous_stride(index.shape)))


def _is_written(ctx: Realizer, x: BufRef, part: BufRef, source: LoopValue) -> bool:
    """Whether the memory of `source` is that of x with new contents in this part, and in nothing else."""
    ref = source.ref
    if ref is None or not same_place(ref, part):
        return False
    name = ref.name
    while name != x.name:
        if name not in ctx.claimed or region(ref) not in map(region, ctx.within[name]):
            return False
        name = ctx.claimed[name]
    return ref.name != x.name


def region(ref: BufRef) -> list[tuple[Dim, Dim]]:
    """The elements that a view shows, in any order: its offset, then sizes by steps; dimensions that follow
    each other are one.
    """
    dims: list[tuple[Dim, Dim]] = []
    order = sorted(zip(ref.stride, ref.shape, strict=True), key=lambda dim: -hint(dim[0]))
    for step, size in order:
        if dims and equal(dims[-1][0], step * size):
            size *= dims.pop()[1]
        if not is_one(size):
            dims.append((step, size))
    return [(ref.offset, 1), *dims]


def same_place(a: BufRef, b: BufRef) -> bool:
    """Whether two views show the same elements of buffers of one layout."""
    if a.dtype is not b.dtype or len(a.shape) != len(b.shape):
        return False
    strides = zip(a.shape, a.stride, b.stride, strict=True)
    steps = all(is_one(n) or equal(s, t) for n, s, t in strides)
    return equal(a.shape, b.shape) and steps and equal(a.offset, b.offset)


def _overlaps(ref: BufRef) -> bool:
    """Whether a view shows some element twice; of sizes that differ between calls, as at this one."""
    shape, stride = ([hint(n) for n in dims] for dims in (ref.shape, ref.stride))
    return sees_twice(TensorSpec(tuple(shape), tuple(stride), ref.dtype))


def memory_of(claimed: Mapping[str, str], name: str) -> str:
    """The name that the memory had first."""
    while name in claimed:
        name = claimed[name]
    return name


def _values(ctx: Realizer) -> Iterator[tuple[fx.Node, LoopValue]]:
    for node, value in ctx.known.items():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, LoopValue):
                yield node, one


def _shows(value: LoopValue, name: str) -> bool:
    ref = value.ref
    return ref is not None and ref.name == name


def _reads(ctx: Realizer, value: LoopValue, name: str) -> bool:
    return any(e.args[0] == name for e in loads_of(ctx.probe(value)))


def _is_read_later(ctx: Realizer, node: fx.Node) -> bool:
    """Whether a call behind the present one reads the value, itself or through a view that is not made yet.
    Where a view of it is written back, an update of that view is in place already.
    """
    now = ctx.order[ctx.node]
    for user in node.users:
        if ctx.order[user] <= now or user.target is aten.copy_.default and operand(user, 1) is not node:
            continue
        if _is_view(user):
            if _is_read_later(ctx, user):
                return True
        elif user.target not in WRITES_BACK or user.args[1] is node or not _updates(ctx.node, user.args[1]):
            return True
    return False


def _is_view(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return node.target is operator.getitem or packet is not None and packet.__name__ in _VIEWS


def _updates(written: fx.Node, value: Any) -> bool:
    """Whether a value is an update of memory that `written` makes, brought into the shape of another view."""
    while isinstance(value, fx.Node) and value is not written and value.op == "call_function":
        if value.target in WRITES_BACK:
            value = value.args[1]
        elif _is_view(value) or value.target in IN_PLACE:
            value = value.args[0]
        else:
            return False
    return value is written
