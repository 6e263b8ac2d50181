"""Attention that a program writes as plain products, as transformers' "eager" does:

    softmax(q @ k.transpose(2, 3) * scale + mask, -1) @ v
    softmax(c - c.max(-1, keepdim=True).values, -1)[..., :-1] @ v     c = cat([scores, sinks], -1)

>>> eager_attention(node)  # by the last product
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from ..base.narrowing import checked
from .index_formulas import NoFormula, Position, Read, affine
from .mask_formula import Formulas, argument, name_of
from .sizes import equal
from .spec import HALVES, TensorSpec

Node = torch.fx.Node
_SOFTMAX = (torch.nn.functional.softmax, torch.softmax)
_CUT = (Ellipsis, slice(None, -1, None))
_CONVERSIONS = ("to", "type", "type_as", "float", "half", "bfloat16")


@dataclass(frozen=True)
class EagerAttention:
    """Operands of such attention. sinks: a number of each head. chain: the nodes from the last product to the
    first, which nothing else reads.
    """

    query: Node
    key: Node
    value: Node
    scale: float
    mask: Node | None
    sinks: Node | None
    chain: tuple[Node, ...]


class _Other(Exception):
    """Something else."""


def eager_attention(node: Node) -> EagerAttention | None:
    """The attention in half precision whose last product the node is."""
    try:
        return _found(node) if name_of(node) == "matmul" else None
    except _Other:
        return None


def _found(last: Node) -> EagerAttention:
    chain, column = [last], None
    weights, value = _operands(last)
    weights = _unconverted(weights, chain)
    path = extra_column(weights)
    if path is not None:
        chain += [weights, *reversed(path)]
        joined: Any = path[0].args[0]
        scores, column = joined
    else:
        _require(weights.target in _SOFTMAX and is_last(weights, 1))
        chain.append(weights)
        scores = weights.args[0]
    scores, mask = _masked(_unconverted(scores, chain), chain)
    first, scale = _scaled(scores, chain)
    query, turned = _operands(first)
    chain.append(first)
    _check(last, first, [query, turned, value], chain)
    _require(name_of(turned) == "transpose" and sorted(dim % 4 for dim in turned.args[1:]) == [2, 3])
    key: Any = turned.args[0]
    sinks = None if column is None else _per_head(column, _spec(query))
    return EagerAttention(query, key, value, scale, mask, sinks, tuple(chain))


def _check(last: Node, first: Node, operands: list[Node], chain: list[Node]) -> None:
    """Shapes and types; and that nothing else reads the scores or the weights."""
    query, turned, value = map(_spec, operands)
    _require(all(len(spec.shape) == 4 for spec in (query, turned, value)))
    _require(equal(query.shape[:2], turned.shape[:2]) and equal(query.shape[:2], value.shape[:2]))
    dtype, scores = _spec(last).dtype, (*query.shape[:3], turned.shape[3])
    _require(dtype in HALVES and _spec(first).dtype == dtype)
    for node in chain[1:]:
        _require(readers(node) <= {*chain})
        spec = node.meta.get("val")
        if type(spec) is TensorSpec:
            _require(spec.dtype in (dtype, torch.float32, torch.float64))
        if name_of(node) in ("add", "mul", "truediv", "div"):
            _require(equal(_spec(node).shape, scores))


def _operands(node: Node) -> tuple[Any, Any]:
    """The two tensors of a product."""
    _require(name_of(node) == "matmul" and len(node.args) == 2 and not node.kwargs)
    _require(all(isinstance(arg, Node) for arg in node.args))
    return node.args[0], node.args[1]


def _unconverted(node: Any, chain: list[Node]) -> Node:
    """The node before its conversions to other types."""
    while isinstance(node, Node) and name_of(node) in _CONVERSIONS:
        before = node.args[0]
        _require(isinstance(before, Node) and _spec(before).device == _spec(node).device)
        chain.append(node)
        node = before
    _require(isinstance(node, Node))
    return node


def _masked(node: Node, chain: list[Node]) -> tuple[Node, Node | None]:
    """The scores and the mask that is added to them."""
    if name_of(node) != "add":
        return node, None
    _require(len(node.args) == 2 and not node.kwargs)
    chain.append(node)
    scores, mask = node.args if _is_score(node.args[0]) else node.args[::-1]
    _spec(mask)
    return _unconverted(scores, chain), checked(Node, mask)


def _is_score(node: Any) -> bool:
    node = _unconverted(node, [])
    return name_of(node) == "matmul" or any(name_of(a) == "matmul" for a in node.all_input_nodes)


def _scaled(node: Node, chain: list[Node]) -> tuple[Node, float]:
    """The product, and the number that it is multiplied by."""
    name = name_of(node)
    if name == "matmul":
        return node, 1.0
    _require(name in ("mul", "truediv", "div") and len(node.args) == 2 and not node.kwargs)
    product, number = node.args
    if name == "mul" and not isinstance(product, Node):
        product, number = number, product
    if not isinstance(number, (int, float)) or not number:
        raise _Other
    chain.append(node)
    return _unconverted(product, chain), float(number) if name == "mul" else 1.0 / number


def _per_head(column: Any, query: TensorSpec) -> Node:
    """The tensor of one number a head that a column of scores repeats."""
    _require(equal(_spec(column).shape, (*query.shape[:3], 1)))
    at = [affine(Position(letter, n)) for letter, n in zip("bhq", query.shape[:3], strict=True)]
    try:
        found = Formulas(views=True).value(column, [*at, affine(0)])
    except NoFormula:
        raise _Other from None
    if type(found) is not Read or not equal(_spec(found.node).shape, query.shape[1:2]):
        raise _Other
    own = affine(0) if query.shape[1] == 1 else at[1]
    _require(found.at == (own,) and _spec(found.node).dtype.is_floating_point)
    return found.node


def _require(fact: bool) -> None:
    if not fact:
        raise _Other


def _spec(node: Any) -> TensorSpec:
    found = node.meta.get("val") if isinstance(node, Node) else None
    if type(found) is not TensorSpec:
        raise _Other
    return found


# A column beside the scores ---------------------------------------------------------------------------------
def extra_column(node: Node) -> list[Node] | None:
    """The nodes from a softmax's concatenation with one column to the softmax, if `node` cuts the column off
    again and nothing else reads them.
    """
    if node.target is not operator.getitem or node.args[1] != _CUT or not _is_call(node.args[0]):
        return None
    softmax: Any = node.args[0]
    if softmax.target not in _SOFTMAX or not is_last(softmax, 1) or not _is_call(softmax.args[0]):
        return None
    shifted: Any = softmax.args[0]
    path = [shifted, softmax]
    if shifted.target in (operator.sub, torch.sub) and len(shifted.args) == 2:
        path = [*_maximum(*shifted.args), *path]
    cat: Any = path[0]
    if cat.target is not torch.cat or not is_last(cat, 1) or len(cat.args[0]) != 2:
        return None
    if any(not readers(part) <= {node, *path} for part in path):
        return None
    scores, column = (part.meta.get("val") for part in cat.args[0])
    known = type(scores) is type(column) is type(softmax.meta.get("val")) is TensorSpec
    return path if known and column.shape[-1:] == (1,) else None


def readers(node: Node) -> set[Node]:
    """The nodes that use it, but for parts of a result that nothing reads."""
    return {user for user in node.users if user.users or user.target is not operator.getitem}


def _maximum(x: Any, top: Any) -> list[Node]:
    """`x`, its maximum over the last dimension and that one's first result, if `top` is it."""
    if not isinstance(top, Node) or top.target is not operator.getitem or top.args[1] != 0:
        return []
    found: Any = top.args[0]
    is_maximum = found.target in ("max", torch.max) and found.args[0] is x and is_last(found, 1)
    return [x, found, top] if is_maximum and found.kwargs.get("keepdim") is True else []


def is_last(node: Node, place: int) -> bool:
    """Whether the dimension that a call names is the last."""
    dim = argument(node, place, "dim")
    return type(dim) is int and dim == -1


def _is_call(node: Any) -> bool:
    return isinstance(node, Node) and node.op.startswith("call")
