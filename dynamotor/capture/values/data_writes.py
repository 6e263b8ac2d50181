"""Writes that autograd does not count: into `x.data`, and `x.data = y`.

A graph takes `.data` where it writes, so that versions stay as they are in eager. What autograd may have saved of the
memory before changes with the write in eager, which no compiled backward follows: then the call runs as it is.

>>> p.data.mul_(0.9)      # nodes: getattr(p, "data"), mul_
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...graph.shape_tensor import ShapeTensor
from ...graph.sizes import leaves_in
from ...graph.tensor_subclass import flatten_all
from ..breaks import Unsupported, unsupported
from .base import Trace


def note_recorded(trace: Trace, given: Iterable[ShapeTensor], result: Any) -> None:
    """Note the memories that a call has taken whose result has a history."""
    if torch.is_grad_enabled() and any(
        isinstance(tensor, ShapeTensor) and tensor.requires_grad for tensor in leaves_in(result)
    ):
        trace.tensors.recorded.update(tensor.memory for tensor in given)


def write_by_data(trace: Trace, written: Sequence[ShapeTensor]) -> None:
    """Let the graph take `.data` where it took `detach()`, for memory that is written."""
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
        refuse_if_recorded(trace, memories)
    for value in taken:
        node = value.node
        if node.op == "call_method" and value.source is None:
            node.op, node.target, node.args = "call_function", getattr, (node.args[0], "data")


def layout(example: Any) -> Any:
    """The dtype and device of an example, and its place in memory."""
    return example.dtype, example.device, example.shape, example.stride(), example.storage_offset()


def refuse_if_recorded(trace: Trace, memories: set[Any]) -> None:
    """Raise Unsupported where autograd may have saved one of the memories."""
    if memories & trace.tensors.recorded:
        raise _refused("autograd has recorded a call with it, and must not see the write")


def _refused(why: str) -> Unsupported:
    stop = unsupported(
        "autograd",
        "a tensor of which `.data` was taken is written",
        why,
        "write before the tensor is used, or outside the compiled function",
    )
    stop.whole = stop.uncaptured_calls = True
    return stop
