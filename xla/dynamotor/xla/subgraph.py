"""Traces a Python function of xla tensors apart from the running program, as a jax function: loop bodies and
exported models.

>>> sub = trace(lambda ts: [ts[0] * weight], [Meta.of((2,), torch.float32)], device, "the loop")
>>> sub.captured            # [weight]: tensors from outside that the function uses are further inputs
>>> sub.program(array, weight_array)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynamotor.extension_api import Event, XlaError, subscribe

from . import metrics
from .compat import OpOverload, TorchDispatchMode, TreeSpec, tree_flatten, tree_map, tree_unflatten
from .device import lane_of, using_lane
from .errors import coded, require
from .execute import Graph, scalar_vector, to_function
from .fallback import written
from .ir import Lane, Meta, Node
from .tensor import Alias, XLATensor, is_xla, node_of, wrap

_LAYOUT = "dynamotor_xla.sharding_constraint.default"


@dataclass(frozen=True)
class Subgraph:
    """A traced function. `program(*inputs, *captured, [scalars], [keys])` gives its outputs; `key` is equal
    for equal programs.

    captured: tensors from outside, and the tensor literals that the function made (`literals` counts these).
    scalars: numbers that the trace lifted out of its program (float64), to be passed as one array where there
    are any.
    """

    graph: Graph
    program: Callable[..., list[Any]]
    captured: list[torch.Tensor]
    scalars: list[float]
    outputs: list[Meta]
    key: tuple
    literals: int = 0

    def reads(self) -> set[int]:
        """The places of those inputs that the program reads or hands out."""
        steps = [p for step in self.graph.steps.values() for p in step.inputs]
        return {-p - 1 for p in [*steps, *self.graph.outputs] if p < 0}

    def without_captured(self) -> Subgraph:
        """The program alone, for tables that live as long as the process."""
        return replace(self, captured=[])

    def call(self, *arrays: Any) -> list[Any]:
        """The program of these arrays and the trace's own numbers."""
        return self.program(*arrays, *([scalar_vector(self.scalars)] if self.scalars else []))


class _Importing(TorchDispatchMode):
    """Replaces tensors of the running program by inputs of the trace where an op meets them."""

    def __init__(self, lane: Lane, name: str) -> None:
        super().__init__()
        self.lane, self.name = lane, name
        self.outside: dict[Node, torch.Tensor] = {}  # by their leaves in the trace
        self._inside: dict[int, XLATensor] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _traces[-1] is not self:  # the op belongs to a function that is traced within this one
            return func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            self._refuse_writes(func, args, kwargs or {})
        args, kwargs = tree_map(self.bring_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    def bring_in(self, value: Any) -> Any:
        """The trace's tensor for one of the running program; anything else as it is."""
        if not is_xla(value) or value._alias.lane is self.lane:
            return value
        inside = self._inside.get(id(value._alias))
        if inside is None:
            leaf = self.lane.leaf(None, value._alias.meta)
            self.lane.place(leaf)
            inside = self._inside[id(value._alias)] = wrap(
                Alias(leaf, stride=value._alias.stride, offset=value._alias.offset)
            )
            self.outside[leaf] = value
        return inside

    def captured(self, first: int) -> list[torch.Tensor]:
        """The tensors behind the leaves from `first` on. A leaf with data is a literal: the function made
        it."""
        around = lane_of(self.lane.device)
        return [
            self.outside[leaf] if leaf in self.outside else wrap(Alias(around.leaf(leaf.data, leaf.meta)))
            for leaf in self.lane.leaves[first:]
        ]

    def _refuse_writes(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        for target in written(func, args, kwargs):
            if is_xla(target) and target._alias.lane is not self.lane:
                raise _lost_write(self.name, f"a tensor from outside ({func})")


_traces: list[_Importing] = []  # under way, the innermost last


def _lost_write(name: str, what: str) -> XlaError:
    return coded(
        "DM669",
        f"{name} changes {what} in place",
        why="it is traced once and run many times: the change would be lost",
        cure="return the new value instead (batch norm: put the module in eval mode)",
        where=metrics.user_line(),
    )


def trace(
    function: Callable[[list[Any]], Sequence[Any]],
    inputs: Sequence[Meta],
    device: torch.device,
    name: str,
    writable: int = 0,
) -> Subgraph:
    """Run `function` once on tensors without values and return the recorded graph.

    function: takes a list of tensors of the given shapes and dtypes, returns a flat sequence of tensors.
    `name`: how errors call it. DM669 where it needs a value (`.item()`, an op without lowering), changes
    tensors from outside in place, or its arguments but the first `writable`: the change to those is part of
    the function.
    """
    lane = Lane(device)
    leaves = [lane.leaf(None, meta) for meta in inputs]
    for leaf in leaves:
        lane.place(leaf)
    importing = _Importing(lane, name)

    def no_values(event: Event) -> None:
        if event.kind == "xla.flush":
            raise coded(
                "DM669",
                f"{name} needs a tensor's value while it is traced ({event.data['cause']})",
                cure="keep values in tensors (torch.where instead of if); ops without a lowering cannot be "
                "used here",
                where=event.data["line"],
            )

    unsubscribe = subscribe(no_values)
    _traces.append(importing)
    try:
        with using_lane(lane), importing:
            given = [wrap(Alias(leaf)) for leaf in leaves]
            results = function(given)
            nodes = [_node(result, importing) for result in results]
    finally:
        _traces.pop()
        unsubscribe()
    if any(_value(tensor._alias.node) is not leaf for tensor, leaf in list(zip(given, leaves))[writable:]):
        raise _lost_write(name, "one of its arguments")
    require(
        not lane.collective,
        "DM669",
        f"{name} uses a collective",
        why="it would have to be run by all replicas in step",
        cure="reduce before or after it",
    )
    positions = tuple(node.position if node.epoch == lane.epoch else lane.place(node) for node in nodes)
    graph = Graph.of(lane, positions)
    key = (tuple(lane.key), positions, len(leaves))
    captured = importing.captured(len(leaves))
    return Subgraph(
        graph,
        to_function(graph),
        captured,
        list(lane.scalars),
        [node.meta for node in nodes],
        key,
        len(captured) - len(importing.outside),
    )


def trace_call(
    fn: Callable[..., Any],
    leaves: Sequence[Any],
    tree: TreeSpec,
    metas: dict[int, Meta],
    device: torch.device,
    name: str,
) -> tuple[Subgraph, TreeSpec]:
    """`fn(*args, **kwargs)`, whose arguments are flattened, as `trace` traces it, and how its results are
    nested.

    metas: shapes and dtypes of the tensors, by their place among the leaves.
    """
    trees: list[TreeSpec] = []

    def body(tensors: list[Any]) -> Sequence[Any]:
        given = dict(enumerate(leaves)) | dict(zip(metas, tensors))
        args, kwargs = tree_unflatten(list(given.values()), tree)
        with torch.no_grad():
            results, found = tree_flatten(fn(*args, **kwargs))
        trees.append(found)
        return results

    return trace(body, list(metas.values()), device, name), trees[0]


def _value(node: Node) -> Node:
    """A node without what only says where its value is."""
    while node.instruction is not None and str(node.instruction.func) == _LAYOUT:
        node = node.inputs[0]
    return node


def _node(result: Any, importing: _Importing) -> Node:
    require(
        isinstance(result, torch.Tensor),
        "DM669",
        f"{importing.name} returned {type(result).__name__}",
        why="all its results must be tensors",
    )
    return node_of(importing.bring_in(result if is_xla(result) else result.to(importing.lane.device)))
