"""Cuts a torch graph around an op that cannot be recorded or differentiated ahead of time: the calls before,
it, the calls after.

Only tensors pass a border, and none that is written later on; autograd joins the parts, as it joins any real
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..graph.shape_tensor import ShapeTensor, shape_mode
from ..graph.spec import TensorSpec


class _Trial:
    """The graph run on ShapeTensors: which memory each call writes, where memory is used, and what is no
    tensor.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        self.calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.env: dict[fx.Node, Any] = dict(zip(placeholders, map(_example, inputs), strict=True))
        self.outside = {tensor.memory for tensor in self.env.values()}
        self.wanting = {tensor.memory for tensor in self.env.values() if tensor.requires_grad}
        self.writes: list[set[Any]] = []
        self.first_use: dict[Any, int] = {}
        with shape_mode():
            for at, node in enumerate(self.calls):
                self._call(at, node)

    def _call(self, at: int, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        given = [self.env[n] for n in node.all_input_nodes if isinstance(self.env[n], ShapeTensor)]
        before = [tensor._version for tensor in given]
        function: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        result = self.env[node] = function(*args, **kwargs)
        written = [
            tensor for tensor, version in zip(given, before, strict=True) if tensor._version != version
        ]
        self.writes.append({tensor.memory for tensor in written})
        self.wanting |= {tensor.memory for tensor in written if tensor.requires_grad}
        for tensor in (*given, result):
            if isinstance(tensor, ShapeTensor):
                self.first_use.setdefault(tensor.memory, at)

    def free(self) -> list[bool]:
        """Whether a border may lie before each call, and at the end."""
        position = {node: at for at, node in enumerate(self.calls)}
        result = [True] * (len(self.calls) + 1)
        for at, node in enumerate(self.calls):
            spans = [(self.first_use[memory], at) for memory in self.writes[at] - self.outside]
            if not isinstance(self.env[node], ShapeTensor):
                spans.append((at, max((position.get(user, at) for user in node.users), default=at)))
            for begin, end in spans:
                result[begin + 1 : end + 1] = [False] * (end - begin)
        return result


def _example(tensor: torch.Tensor) -> ShapeTensor:
    made = ShapeTensor.make(TensorSpec.of(tensor), tensor.requires_grad and tensor.is_leaf)
    if tensor.requires_grad and not tensor.is_leaf:
        with torch.enable_grad():
            made.copy_(ShapeTensor.make(made.spec, requires_grad=True))
    return made


def region_around(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], at: fx.Node | None
) -> tuple[int, int] | None:
    """The smallest range of the graph's calls, around call `at`, that can be run apart; None when it would be
    all of them.

    at: None stands for the first call that writes an input of which a gradient is wanted.
    """
    trial = _Trial(gm, inputs)
    free = trial.free()
    if at is None:
        start = next(
            (k for k, memories in enumerate(trial.writes) if memories & trial.wanting & trial.outside), None
        )
    else:
        start = trial.calls.index(at)
    if start is None:
        return None
    stop = start + 1
    while not free[stop]:
        stop += 1
    # What is written from here on may not have been saved for a backward before: eager decides what it saves.
    later = set().union(*trial.writes[start:]) & trial.outside
    start = min([start, *(trial.first_use[memory] for memory in later)])
    while not free[start]:
        start -= 1
    return None if stop - start == len(trial.calls) else (start, stop)
