"""Moves products that nothing waits for to where a collective is on its way: in a tensor parallel backward
the gradients of weights run while gradients of activations are gathered or scattered.

>>> run_beside(graph)     # w = mm(...); start; y = wait(start)  ->  start; w = mm(...); y = wait(start)
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import fx

from ..base.compat import OpOverload
from ..graph.nodes import operand, overload
from ..graph.op_facts import facts, is_collective
from ..graph.spec import GraphInfo, TensorSpec
from .collectives import has_collectives, hoist_starts, sink_waits

aten = torch.ops.aten
_wait = torch.ops._c10d_functional.wait_tensor.default
# By product: which operands are multiplied.
_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
# A GPU of 2024 and its links: seconds decide which products go where, so that no link waits for one.
_LINK, _LATENCY = 250e9, 15e-6
_RATES = {2: 500e12, 4: 60e12}  # by bytes of a number
_BACK = 2  # waits that a product may cross: it keeps its operands in memory


def _moved(start: fx.Node) -> float:
    """Seconds of a collective."""
    found = [node.meta["val"] for node in (start, *start.all_input_nodes)]
    return _LATENCY + max(spec.hinted().nbytes for spec in found if isinstance(spec, TensorSpec)) / _LINK


def _multiplied(product: fx.Node) -> float:
    """Seconds of a product."""
    first = _PRODUCTS[overload(product)]
    a, b = [operand(product, first + k).meta["val"].hinted() for k in range(2)]
    return 2 * math.prod(a.shape) * b.shape[-1] / _RATES.get(a.dtype.itemsize, 30e12)


def _is_product(node: fx.Node) -> bool:
    return node.target in _PRODUCTS and isinstance(node.meta.get("val"), TensorSpec)


def run_beside(graph: fx.Graph) -> None:
    """Fill the time between starts and waits with the products before them, nearest first."""
    waits = [node for node in graph.nodes if node.target is _wait]
    free = [node for node in graph.nodes if _is_product(node)]
    for n, wait in enumerate(waits):
        start = wait.args[0]
        if not isinstance(start, fx.Node) or not is_collective(start.target):
            continue
        place = {node: i for i, node in enumerate(graph.nodes)}
        floor = place[waits[n - _BACK]] if n >= _BACK else -1
        between = [product for product in free if place[start] < place[product] < place[wait]]
        left = _moved(start) - sum(map(_multiplied, between))
        for product in [p for p in reversed(free) if floor < place[p] < place[start]]:
            group = list(_with_views(product, wait, place))
            users = {user for node in group for user in node.users}.difference(group)
            if left > 0 and all(place[user] > place[wait] for user in users):
                for node in group:
                    wait.prepend(node)
                left -= _multiplied(product)
                free.remove(product)


def _with_views(node: fx.Node, wait: fx.Node, place: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """A node and the views of it that stand before the wait."""
    yield node
    for user in sorted(node.users, key=place.__getitem__):
        if isinstance(user.target, OpOverload) and place[user] < place[wait] and facts(user.target).is_view:
            yield from _with_views(user, wait, place)


def order_collectives(gm: fx.GraphModule, info: GraphInfo) -> None:
    """The pass of the native compiler."""
    if has_collectives(gm.graph):
        if info.kind == "backward":
            hoist_starts(gm.graph)
        sink_waits(gm.graph)
        run_beside(gm.graph)
