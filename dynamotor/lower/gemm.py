"""Matrix products: a bias that is added by the next kernel anyway need not be added by the product.

MKL is 3-8 % faster without the bias (`addmm` fills the result with it and then accumulates), and the kernel
that follows reads the product in any case. Where nothing fusible follows, `addmm` stays, and with halves on a
CPU: oneDNN adds the bias before it rounds. On a GPU, matrices of a batch are copied in their own layout.
"""

from __future__ import annotations

import torch
from torch import fx

from ..base import compat
from ..graph.nodes import arguments, operand, spec_of, take_place
from ..graph.op_facts import facts
from ..graph.shapes import call
from ..graph.sizes import divides, hint
from ..graph.spec import HALVES, GraphInfo, aten
from .extern import BY_DESIGN
from .lowering import lowerings


def split_bias(gm: fx.GraphModule, info: GraphInfo) -> None:
    """addmm(bias, a, b) → mm(a, b) + bias, when only kernels of ours read it."""
    graph = gm.graph
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target is aten.addmm.default]:
        (bias, a, b), spec = arguments(node), spec_of(node)
        if (
            any(value != 1 for value in node.kwargs.values())
            or spec_of(bias).dtype != spec.dtype
            or not spec.dtype.is_floating_point
            or (spec.dtype in HALVES and spec.device.type == "cpu")
        ):
            continue
        if not node.users or not all(is_fused(user, node) for user in node.users):
            continue
        with graph.inserting_before(node):
            product = call(graph, aten.mm.default, a, b, spec=node.meta["val"])
            total = call(graph, aten.add.Tensor, product, bias, spec=node.meta["val"])
        take_place(total, node)


def copy_as_it_lies(gm: fx.GraphModule, info: GraphInfo) -> None:
    """bmm(q, clone(k.transpose(1, 2))) → bmm(q, clone(k).transpose(1, 2)): whole vectors move, and cuBLAS
    reads either.
    """
    graph = gm.graph
    for node in [
        n
        for n in graph.nodes
        if n.op == "call_function" and n.target in (aten.bmm.default, aten.baddbmm.default)
    ]:
        for factor in dict.fromkeys(arguments(node)[-2:]):
            copy: fx.Node = factor
            views: list[fx.Node] = []
            while copy.target in _VIEWS and copy.users.keys() == {views[-1] if views else node}:
                views.append(copy)
                copy = operand(copy, 0)
            if _is_transposed_copy(copy, factor) and copy.users.keys() == {views[-1] if views else node}:
                with graph.inserting_before(node):
                    turned = call(graph, aten.transpose.int, copy.args[0], -2, -1)
                    dense = call(graph, aten.clone.default, turned, memory_format=torch.contiguous_format)
                    batch, rows, columns = spec_of(factor).shape
                    flat = call(graph, aten.view.default, dense, [batch, columns, rows])
                    back = call(graph, aten.transpose.int, flat, 1, 2)
                node.replace_input_with(factor, back)
                for unused in (*views, copy):
                    graph.erase_node(unused)


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def _is_transposed_copy(node: fx.Node, factor: fx.Node) -> bool:
    """Whether a node copies matrices that are contiguous along their columns, with columns that fill 16
    bytes.
    """
    if (
        node.target is not aten.clone.default
        or node.kwargs.get("memory_format") is not torch.contiguous_format
    ):
        return False
    spec = spec_of(operand(node, 0))
    if (
        len(spec.shape) < 3
        or spec.shape[-2:] != spec_of(factor).shape[-2:]
        or min(map(hint, spec.shape[-2:])) < 2
    ):
        return False
    return spec.stride[-2] == 1 and spec.stride[-1] != 1 and divides(16, spec.shape[-2] * spec.dtype.itemsize)


def is_fused(user: fx.Node, value: fx.Node) -> bool:
    """Whether a user becomes part of a generated kernel, looking through views."""
    if user.op != "call_function" or not isinstance(user.target, compat.OpOverload):
        return False
    if facts(user.target).is_view or user.target is aten._unsafe_view.default:
        return bool(user.users) and all(is_fused(next_user, user) for next_user in user.users)
    return user.target in lowerings and user.target not in BY_DESIGN
