"""Products of a few rows with weights that are kept as bytes (int8, uint8) and converted in the graph.

    mm(x, t(w).to(x.dtype) * s)       # x: up to 8 rows

A product by MKL needs the converted weights in memory: written once and read once, at four times the bytes.
With few rows the memory's rate decides, so each row becomes a sum over products, and one kernel that reads
the bytes once computes all of them. With more rows a library's blocking of registers is worth more.
"""

from __future__ import annotations

import torch
from torch import fx

from ..graph.nodes import arguments, find_spec, operand, overload, spec_of, take_place
from ..graph.op_facts import facts
from ..graph.shapes import call
from ..graph.spec import GraphInfo, aten, numel
from .lowering import lowerings

ROWS = {torch.float32: 8, torch.bfloat16: 2, torch.float16: 2}  # oneDNN has instructions for halves
LEAST = 1 << 16  # weights; below, a call costs more than their memory
NARROW = (torch.int8, torch.uint8)
_CHEAP = (aten._to_copy.default, aten.reshape.default, aten._unsafe_view.default)


def sum_narrow_products(gm: fx.GraphModule, info: GraphInfo) -> None:
    """mm and addmm of few rows with converted bytes → sums."""
    for node in [n for n in gm.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]:
        *bias, x, w = arguments(node)
        spec = spec_of(node)
        if node.kwargs or spec.is_symbolic or spec.device.type != "cpu" or not _is_narrow(w, node):
            continue
        if spec.shape[0] <= ROWS.get(spec.dtype, 0):
            with gm.graph.inserting_before(node):
                take_place(_sums(gm.graph, x, w, bias, spec.dtype), node)


def _is_narrow(w: fx.Node, product: fx.Node) -> bool:
    """Whether a weight is computed for this product alone, from bytes and from what is much smaller."""
    count, bytes_seen = numel(spec_of(w).shape), False
    todo = [(w, product)]
    while todo:
        node, user = todo.pop()
        spec = find_spec(node)
        if spec is None or spec.is_symbolic:
            return False
        if numel(spec.shape) * 8 <= count:
            continue
        if spec.dtype in NARROW:
            bytes_seen = True
        elif node.users.keys() != {user} or not _is_fused(node):
            return False
        else:
            todo += [(operand, node) for operand in node.all_input_nodes]
    return bytes_seen and int(count) >= LEAST


def _is_fused(node: fx.Node) -> bool:
    """Whether a node is computed in the kernel that reads it."""
    if node.op != "call_function" or node.target not in lowerings:
        return False
    return node.target in _CHEAP or facts(overload(node)).is_view or facts(overload(node)).pointwise


def _sums(graph: fx.Graph, x: fx.Node, w: fx.Node, bias: list[fx.Node], dtype: torch.dtype) -> fx.Node:
    """The rows of x times w, each as one sum over w's rows, computed in float32."""

    def wide(value: fx.Node) -> fx.Node:
        if value.target is aten._to_copy.default and spec_of(operand(value, 0)).dtype in NARROW:
            value = operand(value, 0)  # halves hold every byte
        if spec_of(value).dtype == torch.float32:
            return value
        return call(graph, aten._to_copy.default, value, dtype=torch.float32)

    weights, rows = wide(w), []
    for n in range(spec_of(x).shape[0]):
        row = call(graph, aten.unsqueeze.default, wide(call(graph, aten.select.int, x, 0, n)), 1)
        products = call(graph, aten.mul.Tensor, weights, row)
        sums = call(graph, aten.sum.dim_IntList, products, [0])
        rows.append(call(graph, aten.unsqueeze.default, sums, 0))
    result = rows[0] if len(rows) == 1 else call(graph, aten.cat.default, rows)
    for addend in bias:
        result = call(graph, aten.add.Tensor, result, wide(addend))
    return result if dtype == torch.float32 else call(graph, aten._to_copy.default, result, dtype=dtype)
