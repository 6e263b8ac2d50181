"""Graph modules that write their Python code only when they are run or printed.

Writing it takes 100 ms for a 12-layer BERT, and most graphs here are only read by the next stage.

>>> graph_module(graph)(x)      # the code is generated here
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..base import compat

_RANDOM_FROM = getattr(torch.ops.aten.random, "from")


def random_from(*args: Any, **kwargs: Any) -> Any:
    """`aten.random.from`, whose name no Python code can write."""
    return _RANDOM_FROM(*args, **kwargs)


class _OnDemand(compat.LazyGraphModule):
    def real_recompile(self) -> None:
        """Write the code, unless it is there."""
        if type(self).forward is not _OnDemand._lazy_forward:
            return
        unwritable = self.graph.find_nodes(op="call_function", target=_RANDOM_FROM)
        for node in unwritable:
            node.target = random_from
        super().real_recompile()
        for node in unwritable:
            node.target = _RANDOM_FROM

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first call; `self(...)`, which FX runs, would print an error of the user's."""
        self.real_recompile()
        return self.forward(*args, **kwargs)

    forward = _lazy_forward


def graph_module(
    graph: torch.fx.Graph, name: str = "Graph", root: torch.nn.Module | None = None
) -> torch.fx.GraphModule:
    """A `GraphModule` over the graph (and the root's attributes, if it has `get_attr` nodes)."""
    return _OnDemand({} if root is None else root, graph, name)


def writes(node: torch.fx.Node) -> bool:
    """Whether a node calls an op that writes an argument."""
    return isinstance(node.target, compat.OpOverload) and node.target._schema.is_mutable


def copied(
    graph: torch.fx.Graph,
    inputs: Iterable[torch.fx.Node],
    nodes: Iterable[torch.fx.Node],
    known: Mapping[torch.fx.Node, Any] | None = None,
) -> dict[torch.fx.Node, Any]:
    """Write placeholders for the inputs and copies of the nodes into a graph; by the node that each is a copy
    of. known: what stands for other nodes.
    """
    made = dict(known or {})
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    return made


def copy_of(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph as it is now; what compiles it rewrites it in place."""
    graph = torch.fx.Graph()
    copied(graph, (), gm.graph.nodes)
    copy = graph_module(graph, type(gm).__name__, gm)
    copy.meta = dict(gm.meta)
    return copy


def rewritten(
    gm: torch.fx.GraphModule,
    find: Callable[[torch.fx.Node], Any],
    rewrite: Callable[[torch.fx.Node, Any], None],
) -> torch.fx.GraphModule:
    """A copy in which `rewrite(node, found)` ran wherever `find(node)` gave something; the graph itself
    where nothing did. Callers keep the original.
    """
    if not any(find(node) for node in gm.graph.nodes):
        return gm
    copy = copy_of(gm)
    for node in list(copy.graph.nodes):
        found = find(node)
        if found is not None:
            rewrite(node, found)
    copy.recompile()
    return copy
