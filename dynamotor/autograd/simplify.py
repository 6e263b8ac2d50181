"""Passes over the joint graph: no-op removal, common subexpressions, dead code.

Values are immutable here, so a clone is its source and equal ops of equal arguments are one op. What must not
be shared with the outside is copied again when the graphs are cut out (`extract.py`).
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from ..base.registry import Registry
from ..graph.nodes import arguments, operand, overload, take_place
from ..graph.op_facts import facts, is_collective
from ..graph.shapes import infer_spec
from ..graph.size_nodes import is_size
from ..graph.sizes import equal
from ..graph.spec import TensorSpec, aten
from .extract import memory_root

Node = torch.fx.Node

# Ops whose offset counts from the start of the storage: their argument may not be exchanged for one stored
# elsewhere.
_ADDRESS_STORAGE = (aten.as_strided.default, aten.as_strided_scatter.default)

# In the meta of nodes.
COPY_OF_INPUT = "copy of an input"
RESULT = "a result of the program"

# One row an op: node -> the node that it equals, or None.
no_op_rules: Registry[Any, Any] = Registry("no-op")
no_op = no_op_rules.register


NO_MEMORY = aten.zeros_like.default  # all other zeros are `full` and `full_like`


def multiply_zeros_without_memory(gm: torch.fx.GraphModule) -> None:
    """Eager's products with zeros that have no memory (the gradient of `sgn`) are such zeros, beside NaN too:
    their factors and divisors count as ones.
    """
    held = set(gm.graph.find_nodes(op="call_function", target=NO_MEMORY))
    for node in gm.graph.nodes if held else ():
        given = [n for n in node.all_input_nodes if isinstance(n.meta["val"], TensorSpec)]
        others = [n for n in given if n not in held]
        if node.op != "call_function" or len(others) == len(given):
            continue
        product = node.target in (aten.mul.Tensor, aten.mul.Scalar)
        if product or (node.target in (aten.div.Tensor, aten.div.Scalar) and node.args[0] in held):
            for other in others:
                with gm.graph.inserting_before(node):
                    ones = gm.graph.call_function(aten.full_like.default, (other, 1))
                ones.meta = {
                    **other.meta,
                    "val": infer_spec(aten.full_like.default, (other.meta["val"], 1), {}),
                }
                node.replace_input_with(other, ones)
        elif others or not (node.target is aten.add.Tensor or facts(node.target).is_view):
            continue
        held.add(node)


def remove_no_ops(gm: torch.fx.GraphModule) -> None:
    """Replace ops that return their argument's value and layout by the argument."""
    for node in gm.graph.nodes:
        rule = no_op_rules.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            same = rule(node)
            if same is not None and not any(user.target in _ADDRESS_STORAGE for user in node.users):
                take_place(same, node)


def keep_copies(gm: torch.fx.GraphModule) -> None:
    """Mark the program's results, which no equal value takes the place of, and its copies of these and of its
    inputs, or that are results: the caller may write into them before the backward, which reads those that
    eager's does.
    """
    results: Any = gm.graph.output_node().args[0]
    for value in results[0]:
        root = memory_root(value)
        made_by = operand(root, 0) if root.target is operator.getitem else root
        root.meta[RESULT] = made_by.meta[RESULT] = True
    find = functools.partial(gm.graph.find_nodes, op="call_function")
    for target, place in ((aten.clone.default, 0), (aten._to_copy.default, 0), (aten.copy.default, 1)):
        for node in find(target=target):
            source = operand(node, place)
            root = memory_root(source)
            lent = root.op == "placeholder" and place == 0 or RESULT in {*node.meta, *root.meta}
            if lent and same_layout(source.meta["val"], node.meta["val"]):
                node.meta[COPY_OF_INPUT] = True


def same_layout(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether both have the same shape, strides, type and device whatever the symbols are."""
    return (
        (a.dtype, a.device) == (b.dtype, b.device) and equal(a.shape, b.shape) and equal(a.stride, b.stride)
    )


@no_op(
    aten.clone.default,
    aten._to_copy.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.permute.default,
    aten._reshape_alias.default,
    aten.copy.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.squeeze.dims,
    aten.squeeze.dim,
    aten.transpose.int,
)
def _unchanged(node: Node) -> Node | None:
    """A copy or view whose result has its source's shape, strides, type and device."""
    if COPY_OF_INPUT in node.meta:
        return None
    if node.target is aten.copy.default:
        source = operand(node, 1)
    else:
        source = operand(node, 0)
        if node.target is aten.as_strided.default and (node.meta["val"].offset != source.meta["val"].offset):
            return None
        if node.target in (aten.permute.default, aten.transpose.int) and not _same_order(node):
            return None
    return source if same_layout(source.meta["val"], node.meta["val"]) else None


@no_op(aten.select_scatter.default, aten.slice_scatter.default)
def _written_again(node: Node) -> Node | None:
    """A part that gets the value that it has: `k[0] += 1` writes the sum, then assigns it."""
    first, value = operand(node, 0), node.args[1]
    if first.op == "call_function" and first.target is node.target:
        if (first.args[1:], first.kwargs) == (node.args[1:], node.kwargs):
            return first
    view = aten.select.int if node.target is aten.select_scatter.default else aten.slice.Tensor
    if not isinstance(value, Node) or value.op != "call_function" or value.target is not view:
        return None
    return first if (value.args, value.kwargs) == ((first, *node.args[2:]), node.kwargs) else None


def _same_order(node: Node) -> bool:
    """Whether a permutation moves no dimension (sizes and strides alone do not tell)."""
    rank = len(node.meta["val"].shape)
    if node.target is aten.permute.default:
        return all(dim % rank == i for i, dim in enumerate(arguments(node)[1]))
    return rank == 0 or arguments(node)[1] % rank == arguments(node)[2] % rank


@no_op(aten.t.default)
def _double_transpose(node: Node) -> Node | None:
    source = operand(node, 0)
    if source.op != "call_function" or source.target is not aten.t.default:
        return None
    first = operand(source, 0)
    return first if same_layout(first.meta["val"], node.meta["val"]) else None


def merge_views(gm: torch.fx.GraphModule) -> None:
    """A view of a view looks at the first source, when that one allows it."""
    views = (aten.view.default, aten._unsafe_view.default)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in views:
            source = node.args[0]
            if (
                source.op == "call_function"
                and source.target in views
                and source.args[0].meta["val"].is_contiguous
            ):
                node.replace_input_with(source, source.args[0])


def share_common_subexpressions(gm: torch.fx.GraphModule) -> None:
    """Equal functional ops on equal arguments become one node; random ops never do, nor collectives (other
    ranks may not have equal ones), nor results that the caller may write into. Of equal elementwise ops on
    views of one tensor the later are views.
    """
    seen: dict[Any, Node] = {}
    of_any_shape: dict[Any, Node] = {}
    for node in gm.graph.nodes:
        if (
            node.op != "call_function"
            or is_size(node)
            or is_collective(node.target)
            or (node.target is not operator.getitem and facts(node.target).random)
            or RESULT in node.meta
        ):
            continue
        try:
            key = (node.target, _key(node.args), _key(tuple(node.kwargs.items())))
            first = seen.setdefault(key, node)
        except TypeError:
            continue
        if first is not node and first.meta["val"] == node.meta["val"]:
            take_place(first, node)
        elif (viewed := _same_in_another_shape(node, of_any_shape)) is not None:
            seen[key] = viewed
            take_place(viewed, node)


_VIEWS = (aten.view.default, aten._unsafe_view.default)
_OF_ALL = (aten.max.default, aten.min.default)


def _same_in_another_shape(node: Node, known: dict[Any, Node]) -> Node | None:
    """The result of an op (elementwise, or the extreme of all elements) as a view of a known result, where a
    known op reads the same contiguous memory in another shape.
    """
    tensors = [
        n for n in node.all_input_nodes if isinstance(n.meta["val"], TensorSpec) and n.meta["val"].shape
    ]
    extreme = node.target in _OF_ALL
    if len(tensors) != 1 or node.target is operator.getitem or not (extreme or _is_map(node)):
        return None
    (read,), spec = tensors, node.meta["val"]
    is_view = read.op == "call_function" and read.target in _VIEWS
    whole = operand(read, 0) if is_view else read
    args = tuple([whole if a is read else a for a in node.args])
    first = known.setdefault((node.target, _key(args), _key(tuple(node.kwargs.items()))), node)
    specs = [read.meta["val"], whole.meta["val"], first.meta["val"], spec]
    if first is node or not all(isinstance(s, TensorSpec) and s.is_contiguous for s in specs):
        return None
    if extreme:
        return first
    sizes = read.args[1] if is_view else list(spec.shape)
    if (
        not is_view
        and spec.is_symbolic
        or read.meta["val"].shape != spec.shape
        or specs[2].dtype != spec.dtype
    ):
        return None
    with node.graph.inserting_before(node):
        viewed = node.graph.call_function(aten.view.default, (first, sizes))
    viewed.meta = {**node.meta}
    return viewed


def _is_map(node: Node) -> bool:
    return node.target is aten._to_copy.default or facts(overload(node)).pointwise


def _key(value: Any) -> Any:
    kind = type(value)
    if kind is int or kind is float or kind is bool:
        return kind, value, str(value) if value == 0 else ""  # 1, 1.0 and True differ, and so do 0.0 and -0.0
    return tuple([_key(v) for v in value]) if isinstance(value, (tuple, list)) else value


def remove_dead_code(gm: torch.fx.GraphModule) -> None:
    """Erase unused nodes; aten's random ops stay, since they advance the generator, and
    collectives.
    """
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "call_function" and not node.users and not has_effect(node):
            gm.graph.erase_node(node)


def has_effect(node: Node) -> bool:
    """Whether a node draws from PyTorch's generator (attention without dropout only could), takes part in a
    collective, or only raises, as the data are.
    """
    if is_collective(node.target):
        return True
    if is_size(node) or node.target is operator.getitem:
        return False
    op = overload(node)
    if op.namespace != "aten" or not facts(op).random:
        return facts(op).asserts
    return not is_attention(node) or _draws_dropout(node)


def is_attention(node: Node) -> bool:
    """Whether a node calls one of aten's attention kernels, which draw random numbers only for dropout."""
    return overload(node).overloadpacket.__name__.startswith("_scaled_dot_product")


def _draws_dropout(node: Node) -> bool:
    """Whether an attention op (not the CPU's, which has none) is asked to drop anything."""
    names = [argument.name for argument in overload(node)._schema.arguments]
    given = dict(zip(names, arguments(node), strict=False)) | node.kwargs
    return (
        node.target is not aten._scaled_dot_product_flash_attention_for_cpu.default
        and given.get("dropout_p", 0.0) != 0.0
    )


PASSES = [
    ("zeros without memory", multiply_zeros_without_memory),
    ("remove no-ops", remove_no_ops),
    ("merge views", merge_views),
    ("share common subexpressions", share_common_subexpressions),
    ("remove dead code", remove_dead_code),
]
