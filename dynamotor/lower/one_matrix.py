"""Batched products of which each batch has the same matrix, as one product.

`torch.matmul` expands a matrix for rows with gaps between them (the last token of a prompt). The batched
product then copies the matrix, the vocabulary's say, and no rule for products of few rows sees it.

>>> multiply_by_one_matrix(gm, info)     # bmm(x, expand(w)) → mm(rows of x, w)
"""

from __future__ import annotations

from torch import fx

from ..graph.nodes import operand, spec_of, take_place
from ..graph.shapes import call
from ..graph.spec import GraphInfo, aten

_REPEATS = (aten.expand.default, aten.unsqueeze.default)


def multiply_by_one_matrix(gm: fx.GraphModule, info: GraphInfo) -> None:
    """bmm of one batch, or of batches of one row with one matrix → mm."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.bmm.default):
        x, w = operand(node, 0), operand(node, 1)
        batches, rows, _ = spec_of(x).shape
        matrix = _expanded(w)
        dim = 0 if _is_one(batches) else 1 if _is_one(rows) and matrix is not None else None
        if dim is None or node.kwargs:
            continue
        with gm.graph.inserting_before(node):
            if matrix is None:
                matrix = call(gm.graph, aten.squeeze.dim, w, 0)
            flat = call(gm.graph, aten.squeeze.dim, x, dim)
            product = call(gm.graph, aten.mm.default, flat, matrix)
            take_place(call(gm.graph, aten.unsqueeze.default, product, dim), node)
        _erase_unread(w)


def _is_one(size: object) -> bool:
    return type(size) is int and size == 1


def _expanded(node: fx.Node) -> fx.Node | None:
    """The matrix that a batch of matrices repeats."""
    shape = spec_of(node).shape[1:]
    while node.target in _REPEATS:
        node = operand(node, 0)
        if spec_of(node).shape == shape:
            return node
    return None


def _erase_unread(node: fx.Node) -> None:
    while node.target in _REPEATS and not node.users:
        source = operand(node, 0)
        node.graph.erase_node(node)
        node = source
