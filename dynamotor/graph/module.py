"""Graph modules that write their Python code only when they are run or printed.

Writing it takes 100 ms for a 12-layer BERT, and most graphs here are only read by the next stage.

>>> graph_module(graph)(x)      # the code is generated here
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx._lazy_graph_module import _LazyGraphModule

_RANDOM_FROM = getattr(torch.ops.aten.random, "from")


def random_from(*args: Any, **kwargs: Any) -> Any:
    """`aten.random.from`, whose name no Python code can write."""
    return _RANDOM_FROM(*args, **kwargs)


class _OnDemand(_LazyGraphModule):
    def real_recompile(self) -> None:
        """Write the code."""
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


def copy_of(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph as it is now; what compiles it rewrites it in place."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return graph_module(graph, "GraphModule", gm)
