"""Cuts a torch graph around an op that cannot be recorded or differentiated ahead of time, or whose result's
size depends on data: the calls before, it, the calls after.

Only tensors and the symbols of sizes pass a border, and none that is written later on where autograd may have
saved it; autograd joins the parts, as it joins any real tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..base import compat
from ..base.narrowing import checked
from ..graph.data_sizes import holds
from ..graph.shape_tensor import ShapeTensor, materialise, shape_mode, spec_of
from ..graph.size_nodes import is_size
from ..graph.sizes import Size, leaves_in
from ..graph.spec import TensorSpec, storage_number
from ..graph.states import enter_inference, is_state_call, leave_inference, random_state
from ..graph.sym_int import to_torch


class Trial:
    """The graph run on ShapeTensors: which memory each call writes, where memory is used, and calls that
    are no
    tensor.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[torch.Tensor], specs: Sequence[Any]) -> None:
        self.calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.env: dict[fx.Node, Any] = dict(zip(placeholders, map(_example, inputs, specs), strict=True))
        tensors = [value for value in self.env.values() if isinstance(value, ShapeTensor)]
        self.outside = {tensor.memory for tensor in tensors}
        self.beside = _beside(inputs, list(self.env.values()))
        self.wanting = {tensor.memory for tensor in tensors if tensor.requires_grad}
        self.records = False  # whether autograd records any call
        self.writes: list[set[Any]] = []
        self.first_use: dict[Any, int] = {}
        self.graded: list[bool] = []  # grad mode around the regions of inference mode that are open
        with shape_mode():
            for at, node in enumerate(self.calls):
                self._call(at, node)

    def _call(self, at: int, node: fx.Node) -> None:
        if is_state_call(node):
            self._state(node)
            return
        if node.target is setattr:  # `x.data = y`
            self.writes.append({self.env[checked(fx.Node, node.args[0])].memory})
            self.env[node] = None
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        given = [self.env[n] for n in node.all_input_nodes if isinstance(self.env[n], ShapeTensor)]
        before = [tensor._version for tensor in given]
        function: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        known = "data_dependent" in node.meta  # only running the call tells more
        result = materialise(node.meta["val"]) if known else function(*args, **kwargs)
        self.env[node] = result
        if isinstance(result, ShapeTensor | torch.SymInt):
            node.meta["val"] = spec_of(result)  # in the symbols of this graph, which may be a part of another
        written = [
            tensor for tensor, version in zip(given, before, strict=True) if tensor._version != version
        ]
        self.writes.append({tensor.memory for tensor in written})
        self.wanting |= {tensor.memory for tensor in written if tensor.requires_grad}
        self.records |= any(t.requires_grad for t in leaves_in(result) if isinstance(t, ShapeTensor))
        for tensor in (*given, result):
            if isinstance(tensor, ShapeTensor):
                self.first_use.setdefault(tensor.memory, at)

    def _state(self, node: fx.Node) -> None:
        """States are not set here, but grad mode: tensors of inference mode would not count their writes."""
        self.writes.append(set())
        self.env[node] = materialise(node.meta["val"]) if node.target is random_state else None
        if node.target is enter_inference:
            self.graded.append(torch.is_grad_enabled())
            compat.set_grad_enabled(not node.args[0])
        elif node.target is leave_inference:
            compat.set_grad_enabled(self.graded.pop())

    def free(self) -> list[bool]:
        """Whether the graph may be cut before each call, and at the end."""
        position = {node: at for at, node in enumerate(self.calls)}
        result = [True] * (len(self.calls) + 1)
        for at, node in enumerate(self.calls):
            later = self.writes[at] - self.outside if self.records else ()
            spans = [(self.first_use[memory], at) for memory in later]
            if not isinstance(self.env[node], ShapeTensor | torch.SymInt):
                spans.append((at, max((position.get(user, at) for user in node.users), default=at)))
            for begin, end in spans:
                result[begin + 1 : end + 1] = [False] * (end - begin)
        return result


def _example(tensor: torch.Tensor, spec: TensorSpec | Size) -> Any:
    if type(spec) is Size:
        return to_torch(spec)
    made = ShapeTensor.make(spec, tensor.requires_grad and tensor.is_leaf)
    if tensor.requires_grad and not tensor.is_leaf:
        with torch.enable_grad():
            made.copy_(ShapeTensor.make(made.spec, requires_grad=True))
    return made


def _beside(inputs: Sequence[Any], examples: Sequence[Any]) -> dict[Any, set[Any]]:
    """For the memory of each input, the memories of the inputs in the same storage: a write into one
    is a write into all for autograd, which counts by storage.
    """
    groups: dict[int, set[Any]] = {}
    for tensor, example in zip(inputs, examples, strict=True):
        if isinstance(example, ShapeTensor):
            groups.setdefault(storage_number(tensor), set()).add(example.memory)
    return {memory: group for group in groups.values() for memory in group}


def _goes_with(node: fx.Node) -> bool:
    """Whether a call that follows one whose result's size data decides only reads that size, or says what
    holds of it.
    """
    return is_size(node) or node.target is holds


def regions_around(
    gm: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    specs: Sequence[Any],
    ats: Sequence[fx.Node] | None,
) -> list[tuple[int, int]] | None:
    """The smallest ranges of the graph's calls, around the calls `ats`, that can be run apart, in order; None
    when that would be all of them.

    specs: those of the inputs, with symbols where sizes differ between calls. ats: None stands for the first
    call that writes an input of which a gradient is wanted.
    """
    trial = Trial(gm, inputs, specs)
    if ats is None:
        wanted = trial.wanting & trial.outside
        starts = [k for k, memories in enumerate(trial.writes) if memories & wanted][:1]
    else:
        starts = [trial.calls.index(at) for at in ats]
    found: list[tuple[int, int]] = []
    for start in starts:
        start, stop = _region(trial, start)
        while found and start <= found[-1][1]:
            start = min(start, found.pop()[0])
        found.append((start, stop))
    return None if not found or found == [(0, len(trial.calls))] else found


def _region(trial: Trial, start: int) -> tuple[int, int]:
    free = trial.free()
    stop = start + 1
    while not free[stop] or stop < len(trial.calls) and _goes_with(trial.calls[stop]):
        stop += 1
    # A tensor written from here on may not have been saved for a backward before: eager decides its saved
    # values.
    later = set().union(*trial.writes[start:]) & trial.outside
    touched = set().union(*(trial.beside[memory] for memory in later))
    start = min([start, *(trial.first_use.get(memory, start) for memory in touched)])
    while not free[start]:
        start -= 1
    return start, stop
