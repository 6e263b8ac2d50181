"""A backward without the gradients that never arrive: the loss does not see every output (logits beside a model's own loss).

Eager's autograd skips what only such outputs lead to. Here the missing tangents are followed through the graph: what is
linear in one vanishes, a sum with one is its other operand, and only what remains reads zeros.

>>> without_tangents(backward, frozenset({5}))      # positions among the placeholders; None where it cannot be done
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..base.registry import Registry
from ..graph.module import graph_module
from ..graph.op_facts import facts
from ..graph.spec import TensorSpec
from .extract import RESHAPES
from .simplify import has_effect, remove_dead_code

aten = torch.ops.aten
Node = torch.fx.Node
NOTHING = object()  # stands for a value that is zero because no gradient arrives

# One row an op: (node, what each argument has become) -> NOTHING, the node that it equals, or None for neither.
absence_rules: Registry[Any, Any] = Registry("absence")
absence = absence_rules.register


class _CannotFill(Exception):
    """A zero would have to be laid out in a way that no constant is."""


@absence(aten.mul.Tensor, aten.mm.default, aten.bmm.default)
def _product(node: Node, a: Any, b: Any) -> Any:
    return NOTHING


@absence(aten.clone.default, aten._to_copy.default, aten.neg.default, aten.sum.dim_IntList, aten.sum.default, aten.mul.Scalar,
         aten.div.Scalar)
def _linear(node: Node, x: Any, *others: Any) -> Any:
    return NOTHING


@absence(aten.div.Tensor)
def _quotient(node: Node, a: Any, b: Any) -> Any:
    return NOTHING if a is NOTHING else None


@absence(aten.constant_pad_nd.default)
def _padded(node: Node, x: Any, pad: Any, value: Any = 0) -> Any:
    return NOTHING if value == 0 else None


@absence(aten.add.Tensor, aten.sub.Tensor)
def _sum(node: Node, a: Any, b: Any) -> Any:
    if a is NOTHING and b is NOTHING:
        return NOTHING
    if a is NOTHING and (node.kwargs.get("alpha", 1) != 1 or node.target is aten.sub.Tensor):
        return None
    other = b if a is NOTHING else a
    if not isinstance(other, Node):
        return None
    have, want = other.meta["val"], node.meta["val"]
    same = (have.shape, have.dtype, have.device) == (want.shape, want.dtype, want.device)
    return other if same and have.stride == want.stride else None  # what follows may be a view that only the sum's strides allow


@absence(aten.where.self)
def _choice(node: Node, condition: Any, a: Any, b: Any) -> Any:
    return NOTHING if a is NOTHING and b is NOTHING else None


def _is_linear_in_its_gradient(target: Any) -> bool:
    """An op of some backward formula whose first argument is the gradient that arrives."""
    name = target._opname
    first = target._schema.arguments[0].name if target._schema.arguments else ""
    return name.endswith(("_backward", "_backward_data")) and "double_backward" not in name and "grad" in first


def _becomes(node: Node, args: tuple) -> Any:
    """NOTHING, a node, or None: the op has to run."""
    target = node.target
    if target is operator.getitem:
        return args[0] if args[0] is NOTHING else None
    rule = absence_rules.get(target)
    if rule is not None:
        return rule(node, *args)
    if not isinstance(target, torch._ops.OpOverload) or not args or args[0] is not NOTHING or has_effect(node):
        return None
    linear = facts(target).is_view or target in RESHAPES or _is_linear_in_its_gradient(target)
    return NOTHING if linear else None


def without_tangents(gm: torch.fx.GraphModule, absent: frozenset[int]) -> torch.fx.GraphModule | None:
    """A copy of the backward graph without these placeholders. Gradients that come from nowhere else are None."""
    graph = torch.fx.Graph()
    env: dict[Node, Any] = {}

    def fill(value: Any, spec: Any) -> Any:
        if value is not NOTHING:
            return value
        if not isinstance(spec, TensorSpec) or spec.is_symbolic or not spec.is_contiguous:
            raise _CannotFill
        zeros = graph.call_function(aten.full.default, (list(spec.shape), 0), {"dtype": spec.dtype, "device": spec.device})
        zeros.meta["val"] = TensorSpec.dense(spec.shape, spec.dtype, spec.device)
        return zeros

    try:
        for position, node in enumerate(gm.graph.nodes):
            if position in absent:
                env[node] = NOTHING
            elif node.op == "output":
                graph.output(tuple([None if v is NOTHING else v for v in torch.fx.map_arg(node.args[0], env.__getitem__)]))
            elif node.op != "call_function" or not any(env[a] is NOTHING for a in node.all_input_nodes):
                env[node] = graph.node_copy(node, env.__getitem__)
            else:
                same = _becomes(node, torch.fx.map_arg(node.args, env.__getitem__))
                env[node] = same if same is not None else graph.node_copy(node, lambda n: fill(env[n], n.meta.get("val")))
    except _CannotFill:
        return None
    found = graph_module(graph)
    remove_dead_code(found)
    return found
