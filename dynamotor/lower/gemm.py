"""Matrix products: a bias that is added by the next kernel anyway need not be added by the product.

MKL is 3-8 % faster without the bias (`addmm` fills the result with it and then accumulates), and the kernel that follows reads
the product in any case. Where nothing fusible follows, `addmm` stays.
"""

from __future__ import annotations

import torch
from torch import fx

from ..graph.info import GraphInfo
from ..graph.op_facts import facts
from .extern import BY_DESIGN
from .lowering import lowerings
from .rewrite import call, spec_of

aten = torch.ops.aten


def split_bias(gm: fx.GraphModule, info: GraphInfo) -> None:
    """addmm(bias, a, b) → mm(a, b) + bias, when only kernels of ours read it."""
    graph = gm.graph
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target is aten.addmm.default]:
        bias, a, b = node.args
        plain = not node.kwargs or all(value == 1 for value in node.kwargs.values())
        if not plain or spec_of(bias).dtype != node.meta["val"].dtype or not spec_of(node).dtype.is_floating_point:
            continue
        if not node.users or not all(is_fused(user, node) for user in node.users):
            continue
        with graph.inserting_before(node):
            product = call(graph, aten.mm.default, a, b, spec=node.meta["val"])
            total = call(graph, aten.add.Tensor, product, bias, spec=node.meta["val"])
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def is_fused(user: fx.Node, value: fx.Node) -> bool:
    """Whether a user becomes part of a generated kernel, looking through views."""
    if user.op != "call_function" or not isinstance(user.target, torch._ops.OpOverload):
        return False
    if facts(user.target).is_view or user.target is aten._unsafe_view.default:
        return bool(user.users) and all(is_fused(next_user, user) for next_user in user.users)
    return user.target in lowerings and user.target not in BY_DESIGN
