"""Puts a plan's all-reduces into a backward graph, each right after the last gradient of its bucket.

>>> # parameters: tensor id -> name; wanted: the graph's inputs
>>> rewriter = BackwardRewriter(averager, parameters, wanted)
>>> gm.meta["on_backward"] = rewriter                              # autograd calls it with the backward graph
>>> rewriter.found  # the plan made of this graph, or the reason why there is none
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ..graph.op_facts import facts
from ..graph.spec import TensorSpec
from .averager import Averager, Place
from .collectives import overlap
from .ops import bucket_start
from .plan import Bucket, Plan, make_plan
from .wrapper import Reason, bucket_caps

Compiled = Callable[..., Any]


def gradient_nodes(backward: fx.GraphModule, names: Sequence[str | None]) -> dict[str, fx.Node]:
    """The node of each named gradient, in the order in which they are computed.

    A gradient that only picks or looks at another value is moved right behind it: traces take results out of
    an op late.
    """
    output = next(n for n in reversed(backward.graph.nodes) if n.op == "output")
    for node in output.all_input_nodes:
        _move_up(node)
    at = {node: i for i, node in enumerate(backward.graph.nodes)}
    named = [
        (name, node)
        for name, node in zip(names, output.args[0], strict=True)
        if name is not None and node is not None
    ]
    return dict(sorted(named, key=lambda pair: at[pair[1]]))


def _move_up(node: fx.Node) -> None:
    chain = []
    while node.target is operator.getitem or (
        isinstance(node.target, OpOverload) and facts(node.target).is_view
    ):
        chain.append(node)
        node = node.all_input_nodes[0]
    for later in reversed(chain):
        if node.op != "placeholder":
            node.append(later)
        node = later


def insert_starts(
    backward: fx.GraphModule, plan: Plan, gradients: Mapping[str, fx.Node], number: int
) -> list[fx.Node]:
    """Start each bucket as early as its gradients and the order of the buckets allow; gives the new nodes."""
    at = {node: i for i, node in enumerate(backward.graph.nodes)}
    starts: list[fx.Node] = []
    last = next(iter(backward.graph.nodes))
    for i, bucket in enumerate(plan.buckets):
        grads = [gradients[slot.name] for slot in bucket.slots]
        ready = max(grads, key=at.__getitem__)
        last = ready if at[ready] >= at[last] else last
        with backward.graph.inserting_after(last):
            start = backward.graph.call_function(
                bucket_start, (grads, starts[-1] if starts else None, number, i)
            )
        start.meta["val"] = TensorSpec.dense((bucket.numel,), bucket.dtype, bucket.device)
        at[start] = at[last]
        starts.append(start)
        last = start
    return starts


def _replace_outputs(
    backward: fx.GraphModule, names: Sequence[str | None], plan: Plan, starts: Sequence[fx.Node]
) -> list[Place | None]:
    """Return the buckets in place of the gradients inside them; says where each gradient is to be found."""
    output = next(n for n in reversed(backward.graph.nodes) if n.op == "output")
    inside = {
        slot.name: (b, s) for b, bucket in enumerate(plan.buckets) for s, slot in enumerate(bucket.slots)
    }
    kept: list[fx.Node] = []
    places: list[Place | None] = []
    for name, node in zip(names, output.args[0], strict=True):
        if name in inside:
            places.append(inside[name])
        elif node is None:
            places.append(None)
        else:
            places.append(len(kept))
            kept.append(node)
    output.args = ((*kept, *starts),)
    return places


class BackwardRewriter:
    """Makes (or takes) the plan when autograd shows the backward graph, and rewrites the graph for it."""

    def __init__(
        self, averager: Averager, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        by_id = {id(p): name for name, p in parameters.items()}
        self.averager, self.parameters = averager, parameters
        self.names = [
            by_id.get(id(t)) for t in inputs if getattr(t, "requires_grad", False)
        ]  # of the gradients, in order
        self.found: Plan | Reason = Reason(
            "backend", "the backend does not differentiate the graph ahead of time"
        )

    def __call__(self, backward: fx.GraphModule) -> Callable[[Compiled], Compiled]:
        overlap(backward)
        gradients = gradient_nodes(backward, self.names)
        self.found = self.averager.plan or self._plan(gradients)
        missing = self._missing(gradients)
        if missing is not None:
            self.found = missing
        if isinstance(self.found, Reason):
            return lambda compiled: compiled
        starts = insert_starts(backward, self.found, gradients, self.averager.number)
        places = _replace_outputs(backward, self.names, self.found, starts)
        return lambda compiled: self.averager.around(compiled, places)

    def _plan(self, gradients: Mapping[str, fx.Node]) -> Plan:
        return make_plan(
            [(name, self.parameters[name]) for name in gradients], bucket_caps(self.averager.ddp)
        )

    def _missing(self, gradients: Mapping[str, fx.Node]) -> Reason | None:
        """Why not all gradients of the module come out of this graph, once each."""
        named = [name for name in self.names if name is not None]
        if len(set(named)) < len(named):
            return Reason("twice", "a parameter is two inputs of the graph")
        wanted = self.averager.plan.names if self.averager.plan else tuple(self.parameters)
        outside = [name for name in wanted if name not in named]
        if outside:
            return Reason(
                "several_graphs", f"not every parameter is used in one graph ({_some(outside)} are not)"
            )
        unused = [name for name in wanted if name not in gradients]
        if unused:
            return Reason("unused", f"parameters without a gradient: {_some(unused)}")
        return None


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} others"


__all__ = ["BackwardRewriter", "Bucket", "gradient_nodes", "insert_starts"]
