"""Puts a plan's all-reduces into a backward graph, each right after the last gradient of its bucket.

>>> # parameters: tensor id -> name; wanted: the graph's inputs
>>> rewriter = BackwardRewriter(averager, parameters, wanted)
>>> gm.meta["on_backward"] = rewriter                              # autograd calls it with the backward graph
>>> rewriter.found  # the plan made of this graph, or the reason why there is none
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from ..base.compat import OpOverload
from ..graph.op_facts import facts
from ..graph.shapes import call
from ..graph.spec import Compiled, TensorSpec
from .averager import Averager
from .collectives import overlap
from .ops import bucket_start, bucket_wait
from .plan import BucketPlan, make_plan
from .wrapper import Reason, bucket_caps


def gradient_nodes(
    graph: fx.Graph, names: Sequence[str | None], values: Sequence[fx.Node | None]
) -> dict[str, fx.Node]:
    """The node of each named gradient, in the order in which they are computed.

    A gradient that only picks or looks at another value is moved right behind it: traces take results out of
    an op late.
    """
    for node in dict.fromkeys(values):
        if node is not None:
            _move_up(node)
    at = {node: i for i, node in enumerate(graph.nodes)}
    named = [
        (name, node)
        for name, node in zip(names, values, strict=True)
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
    graph: fx.Graph, plan: BucketPlan, gradients: Mapping[str, fx.Node], number: int
) -> list[fx.Node]:
    """Start each bucket as early as its gradients and the order of the buckets allow; gives the new nodes."""
    at = {node: i for i, node in enumerate(graph.nodes)}
    starts: list[fx.Node] = []
    last = next(iter(graph.nodes))
    for i, bucket in enumerate(plan.buckets):
        grads = [gradients[slot.name] for slot in bucket.slots]
        ready = max(grads, key=at.__getitem__)
        last = ready if at[ready] >= at[last] else last
        with graph.inserting_after(last):
            spec = TensorSpec.dense((bucket.numel,), bucket.dtype, bucket.device)
            before = starts[-1] if starts else None
            start = call(graph, bucket_start, grads, before, number, i, spec=spec)
        at[start] = at[last]
        starts.append(start)
        last = start
    return starts


def insert_waits(
    graph: fx.Graph, plan: BucketPlan, starts: Sequence[fx.Node], number: int
) -> dict[str, fx.Node]:
    """At the end of the graph wait for each bucket, in order; gives the nodes of the averages."""
    averages = {}
    for i, (bucket, start) in enumerate(zip(plan.buckets, starts, strict=True)):
        specs = tuple(
            TensorSpec(slot.shape, slot.stride, bucket.dtype, bucket.device) for slot in bucket.slots
        )
        wait = call(graph, bucket_wait, start, starts[-1], number, i, spec=specs)
        for k, slot in enumerate(bucket.slots):
            averages[slot.name] = call(graph, operator.getitem, wait, k, spec=specs[k])
    return averages


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
        self.found: BucketPlan | Reason = Reason(
            "backend", "the backend does not differentiate the graph ahead of time"
        )

    def __call__(self, backward: fx.GraphModule) -> Callable[[Compiled], Compiled]:
        overlap(backward)
        output = next(n for n in reversed(backward.graph.nodes) if n.op == "output")
        with backward.graph.inserting_before(output):
            output.args = (tuple(self.averages(backward.graph, output.args[0])),)
        if isinstance(self.found, Reason):
            return lambda compiled: compiled
        return lambda compiled: self.averager.around(compiled, self.names)

    def averages(self, graph: fx.Graph, values: Sequence[fx.Node | None]) -> Sequence[fx.Node | None]:
        """What takes the place of the gradients, which buckets of `found` average; they themselves where it
        is a reason.
        """
        gradients = gradient_nodes(graph, self.names, values)
        ready = [(name, self.parameters[name]) for name in gradients]
        self.found = (
            self._missing(gradients) or self.averager.plan or make_plan(ready, bucket_caps(self.averager.ddp))
        )
        if isinstance(self.found, Reason):
            return values
        number = self.averager.number
        starts = insert_starts(graph, self.found, gradients, number)
        averages = insert_waits(graph, self.found, starts, number)
        return [averages.get(name, value) for name, value in zip(self.names, values, strict=True)]  # type: ignore[arg-type]

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
        return Reason("unused", f"parameters without a gradient: {_some(unused)}") if unused else None


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} others"


__all__ = ["BackwardRewriter", "gradient_nodes", "insert_starts"]
