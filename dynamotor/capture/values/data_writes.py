"""Writes that autograd does not count: into `x.data`, and `x.data = y`.

A graph takes `.data` where it writes, so that versions stay as they are in eager. What autograd may have saved of the
memory before changes with the write in eager, which no compiled backward follows: then the call runs as it is.

>>> p.data.mul_(0.9)      # nodes: getattr(p, "data"), mul_
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...graph.shape_tensor import ShapeTensor
from ...graph.sizes import leaves_in
from ...graph.tensor_subclass import flatten_all
from ..breaks import Unsupported, unsupported
from .base import Trace


def note_recorded(trace: Trace, given: Iterable[ShapeTensor], written: Sequence[Any], result: Any) -> None:
    """Note the arguments of a call whose result has a history. A view saves nothing of its memory."""
    if not torch.is_grad_enabled():
        return
    results = [leaf for leaf in leaves_in(result) if isinstance(leaf, ShapeTensor)]
    if not any(leaf.requires_grad for leaf in results):
        return
    memories = {tensor.memory for tensor in given}
    if not written and all(leaf.memory in memories for leaf in results):
        return
    for tensor in given:
        trace.tensors.recorded.setdefault(tensor.memory, []).append(tensor)


def written_part(target: Any, args: Sequence[Any]) -> ShapeTensor | None:
    """The view that `x[index] = value` writes, for an index of numbers and slices; None for all of the tensor."""
    if target is not operator.setitem or type(args[0]) is not ShapeTensor:
        return None
    index = args[1] if type(args[1]) is tuple else (args[1],)
    if not all(type(at) in (int, torch.SymInt, slice) or at is Ellipsis for at in index):
        return None
    with torch.no_grad():
        part: Any = args[0][index]
    return part


def write_by_data(trace: Trace, written: Sequence[ShapeTensor], part: ShapeTensor | None = None) -> None:
    """Let the graph take `.data` where it took `detach()`, when something is written: a tensor beside it may be a view of
    the same one, with its version counter. For memory that is written itself, only where no compiled backward would
    miss it. part: all that is written.
    """
    memories = {tensor.memory for tensor in written if isinstance(tensor, ShapeTensor)}
    aliases = [v for v in trace.tensors.by_example.values() if v.data_of is not None]
    taken = [v for v in aliases if memories & {leaf.memory for leaf in flatten_all([v.example])}]
    if any(not isinstance(v.example, ShapeTensor) for v in taken):
        raise _refused("it is of a subclass")
    has_history = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in written)
    if taken and has_history:  # the alias gets one too, which `x.data` has not
        raise _refused("the value that is written has a history")
    if any(layout(v.example) != layout(v.data_of.example) for v in taken if v.data_of is not None):
        raise _refused("it has another shape or order than the tensor")
    if taken:
        refuse_if_recorded(trace, memories, part)
    for value in aliases:
        node = value.node
        if node.op == "call_method" and value.source is None:
            node.op, node.target, node.args = "call_function", getattr, (node.args[0], "data")


def layout(example: Any) -> Any:
    """The dtype and device of an example, and its place in memory."""
    return example.dtype, example.device, example.shape, example.stride(), example.storage_offset()


def refuse_if_recorded(trace: Trace, memories: Iterable[Any], part: ShapeTensor | None = None) -> None:
    """Raise Unsupported where autograd may have saved some of the memories, or of the `part` that is written."""
    saved = [tensor for memory in memories for tensor in trace.tensors.recorded.get(memory, ())]
    if any(part is None or not _apart(part, tensor) for tensor in saved):
        raise _refused("autograd has recorded a call with it, and must not see the write")


def _apart(a: ShapeTensor, b: ShapeTensor) -> bool:
    """Whether two views of one memory are known to have no element in common: their strides are those of one box, and
    they are apart along one of its sides. Symbolic sizes are guarded to keep their values.
    """
    layouts = [([*map(int, t.shape)], [*map(int, t.stride())], int(t.storage_offset())) for t in (a, b)]
    steps = {s for shape, strides, _ in layouts for n, s in zip(shape, strides) if n > 1}
    sides = sorted({1, *steps}, reverse=True)
    if a.dtype != b.dtype or 0 in steps:
        return False
    first, second = (_ranges(*of, sides) for of in layouts)
    if first is None or second is None:
        return False
    return any(p.stop <= q.start or q.stop <= p.start for p, q in zip(first, second))


def _ranges(shape: list[int], strides: list[int], rest: int, sides: list[int]) -> list[range] | None:
    """The coordinates that a view covers in a box with these strides; None where they run over."""
    extents = {stride: n for n, stride in zip(shape, strides) if n > 1}
    if len(extents) != sum(n > 1 for n in shape):
        return None
    found = list[range]()
    for side, above in zip(sides, [None, *sides]):
        at, rest = divmod(rest, side)
        found.append(range(at, at + extents.get(side, 1)))
        if above is not None and (above % side or found[-1].stop > above // side):
            return None
    return found


def _refused(why: str) -> Unsupported:
    stop = unsupported(
        "autograd",
        "a tensor of which `.data` was taken is written",
        why,
        "write before the tensor is used, or outside the compiled function",
    )
    stop.whole = stop.uncaptured_calls = True
    return stop
