"""Inputs that a graph writes get back their contents where it raises: the call then runs in eager from its start,
where the program's own handlers see the error and Python's changes are those up to it.

>>> written(trace)      # (0, 2): a graph that writes its first and its third input
>>> run = undone(run, (0, 2))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynamotor import _C

from ..base import compat
from ..graph.shape_tensor import is_written_unseen
from .failed_graphs import acts_outside
from .values.base import Trace

# An attribute of the error of a graph in parts: an earlier part has recorded a write in autograd's graph.
JOINED = "dynamotor_joined"
MOST_BYTES = 1 << 16  # of the contents that are copied before a call; a few microseconds


def written(trace: Trace, may_join: bool = False) -> tuple[int, ...] | None:
    """The places of the inputs that the graph writes; None where it has effects that are not undone. may_join: autograd
    may record a write; one that it has recorded when the graph raises is not undone.
    """
    values = [v for v in trace.tensors.outside if v.in_graph and (v.written or is_written_unseen(v.example))]
    tensors, places = [v.obj for v in values], {source: n for n, source in enumerate(trace.graph.inputs)}
    if any(map(acts_outside, trace.graph.graph.nodes)) or not all(map(_is_plain, tensors)):
        return None
    if sum(map(_span, tensors)) > MOST_BYTES or any(
        getattr(v.example, "reshaped", False) or not (may_join or v.example.is_leaf) for v in values
    ):
        return None
    return tuple([places[v.source] for v in values])


def _is_plain(tensor: Any) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first to its last element."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def undone(run: Callable[..., Any], places: tuple[int, ...]) -> Callable[..., Any]:
    """A compiled graph that leaves the contents and versions of the inputs at `places` as they were where it
    raises (hooks of saved tensors raise on purpose, to end a checkpoint's recomputation).
    """
    if not places:
        return run

    def run_undone(*tensors: Any) -> Any:
        given = [tensors[place] for place in places]
        saved = _C.saved_memory(given)
        counted = tuple([t for t in given if not t.is_inference()])
        versions = tuple([t._version for t in counted])
        histories = [(t.requires_grad, t.grad_fn) for t in given]
        try:
            return run(*tensors)
        except Exception as error:
            unhooked = compat.top_saved_hooks(True) is None
            if unhooked and [(t.requires_grad, t.grad_fn) for t in given] == histories:
                _C.put_memory_back(given, saved)
                compat.set_version_counter(counted, versions)
            elif unhooked:
                error.__dict__[JOINED] = True
            raise

    return run_undone
