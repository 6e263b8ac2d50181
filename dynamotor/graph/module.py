"""Graph modules that write their Python code only when they are run or printed.

Writing it takes 100 ms for a 12-layer BERT, and most graphs here are only read by the next stage.

>>> graph_module(graph)(x)      # the code is generated here
"""

from __future__ import annotations

import torch
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module(
    graph: torch.fx.Graph, name: str = "Graph", root: torch.nn.Module | None = None
) -> torch.fx.GraphModule:
    """A `GraphModule` over the graph (and the root's attributes, if it has `get_attr` nodes)."""
    return _LazyGraphModule({} if root is None else root, graph, name)
