"""Cuts a torch graph around an op that cannot be recorded or differentiated ahead of time, or whose result's
size depends on data: the calls before, it, the calls after.

Only tensors and the symbols of sizes pass a border, and none that is written later on where autograd may have
saved it; autograd joins the parts, as it joins any real tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ..base import compat
from ..base.narrowing import checked
from ..graph.data_sizes import holds
from ..graph.nested_size import NestedSize
from ..graph.shape_tensor import ShapeTensor, materialise, shape_mode, spec_of
from ..graph.size_nodes import is_size
from ..graph.sizes import Size, leaves_in
from ..graph.spec import TensorSpec, storage_number
from ..graph.states import enter_inference, is_state_call, leave_inference, random_state
from ..graph.sym_int import from_torch, to_torch
from ..graph.tensor_subclass import Later, WrapperSpec, flatten_all, is_wrapper
from .desugar import same_leaves


class Trial:
    """The graph run on ShapeTensors: which memory each call writes, where memory is used, and calls that
    are no
    tensor.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[torch.Tensor], specs: Sequence[Any]) -> None:
        self.calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.env: dict[fx.Node, Any] = dict(zip(placeholders, _examples(inputs, specs), strict=True))
        examples = list(self.env.values())
        self.outside = _memories(examples)
        self.beside = _beside(flatten_all(inputs), flatten_all(examples))
        self.wanting = _memories(value for value in examples if _wants(value))
        self.has_wrappers = any(map(is_wrapper, examples))
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
        tensors = [self.env[n] for n in node.all_input_nodes if isinstance(self.env[n], torch.Tensor)]
        given = [*tensors, *flatten_all(filter(is_wrapper, tensors))]
        before = [tensor._version for tensor in given]
        function: Any = node.target
        if node.op == "call_method":
            of = torch.Tensor if isinstance(args[0], torch.Tensor) else type(args[0])  # or a size's
            function = getattr(of, str(node.target))
        known = "data_dependent" in node.meta  # only running the call tells more
        result = materialise(node.meta["val"]) if known else function(*args, **kwargs)
        self.env[node] = from_torch(result) if type(result) is torch.SymFloat else result
        if isinstance(result, torch.Tensor | torch.SymInt):
            node.meta["val"] = spec_of(result)  # in the symbols of this graph, which may be a part of another
        written = [
            tensor for tensor, version in zip(given, before, strict=True) if tensor._version != version
        ]
        self.writes.append(_memories(written))
        self.wanting |= _memories(filter(_wants, written))
        self.records |= any(map(_wants, leaves_in(result)))
        self.has_wrappers |= any(map(is_wrapper, leaves_in(result)))
        for memory in _memories([*given, result]):
            self.first_use.setdefault(memory, at)

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
            if not _passes(self.env[node]):
                spans.append((at, max((position.get(user, at) for user in node.users), default=at)))
            for begin, end in spans:
                result[begin + 1 : end + 1] = [False] * (end - begin)
        return result


def _passes(value: Any) -> bool:
    """Whether a value may pass a border: a jagged tensor's own size is asked of the tensor there."""
    plain = type(value) is torch.SymInt and type(from_torch(value)) is not NestedSize
    return plain or isinstance(value, torch.Tensor)


def _memories(values: Iterable[Any]) -> set[Any]:
    """The memories of tensors, and of those inside of wrappers."""
    return {leaf.memory for leaf in flatten_all(values) if isinstance(leaf, ShapeTensor)}


def _wants(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _examples(inputs: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
    """Inputs without data: leaves, and results of something, as the real ones are."""
    same, made = same_leaves(inputs), list[Any]()  # the flat ones
    found = []
    for tensor, spec in zip(inputs, specs, strict=True):
        leaves = [spec] if type(spec) is TensorSpec else [] if type(spec) is Size else spec.leaves()
        start = len(made) + (type(spec) is Size)
        inner = [ShapeTensor.make(leaf) for leaf in leaves]
        made += [made[same[k]] if k in same else leaf for k, leaf in enumerate(inner, start)] or [None]
        found.append(to_torch(spec) if type(spec) is Size else _example(tensor, spec, made[start:]))
    return found


def _example(tensor: torch.Tensor, spec: TensorSpec | WrapperSpec, leaves: list[Any]) -> Any:
    if type(spec) is WrapperSpec:
        with shape_mode(), torch.no_grad():
            made = spec.wrap(leaves).detach()
    else:
        made = leaves[0]
    if not tensor.requires_grad or tensor.is_leaf:
        return made.requires_grad_(tensor.requires_grad) if tensor.requires_grad else made
    with torch.enable_grad(), shape_mode():
        return Later.apply(torch.empty(0, requires_grad=True), lambda: made)


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
    if any(trial.writes) and trial.has_wrappers:
        return None  # a write through `__torch_dispatch__` counts no version of the tensors that parts save
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
