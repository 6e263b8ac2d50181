"""Gradients of weights that read a value which is computed again, behind the gradient of that value.

>>> move_behind_their_gradients(nodes, backward, is_made_again)      # in place
"""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import fx

from ..graph.nodes import operand
from .extract import is_view, memory_root
from .simplify import has_effect

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten._grouped_mm.default)


def move_behind_their_gradients(
    nodes: list[fx.Node], backward: set[fx.Node], is_made_again: Callable[[fx.Node], bool]
) -> None:
    """Move products that read a value which is made again (gradients of weights) behind the products that
    give the gradient of that value, in place.

    The kernel that makes the value again can then be the one that reads that gradient: both read values that
    the forward kept. `nodes`: in order. `is_made_again`: of an operand that the forward computes.
    """
    place = {node: i for i, node in enumerate(nodes)}
    readers: dict[fx.Node, list[fx.Node]] = {}  # of an incoming gradient
    wanted: dict[fx.Node, list[fx.Node]] = {}  # of a value that is made again
    for node in nodes:
        if node in backward and node.target in _PRODUCTS:
            for arg in node.all_input_nodes:
                if arg in backward:
                    readers.setdefault(memory_root(arg), []).append(node)
                elif is_made_again(arg):
                    wanted.setdefault(memory_root(arg), []).append(node)
    settled: set[fx.Node] = set()
    for products in wanted.values():
        gradients = {memory_root(arg) for node in products for arg in node.all_input_nodes} & backward
        others = {other for g in gradients for other in readers[g]} - set(products)
        last = max(others, key=place.__getitem__, default=products[0])
        moved = _with_users(products, place, place[last])
        if moved is None or others & moved or last in settled:
            continue
        settled |= moved
        for node in sorted(moved, key=place.__getitem__, reverse=True):
            last.append(node)
        nodes = [node for node in nodes[0].graph.nodes if node in place]
        place = {node: i for i, node in enumerate(nodes)}


def _with_users(products: list[fx.Node], place: dict[fx.Node, int], end: int) -> set[fx.Node] | None:
    """The products before a place and the users of theirs before it; None where one has an effect."""
    found: set[fx.Node] = set()
    stack = list(products)
    while stack:
        node = stack.pop()
        if node in found or place.get(node, end) >= end:
            continue
        if has_effect(node):
            return None
        found.add(node)
        stack += node.users
    return found


def is_kept(node: fx.Node, saved: Container[fx.Node]) -> bool:
    """Whether a value of the forward is there in the backward: it, or the value of which it is a view."""
    while node.op == "call_function" and node not in saved:
        if not is_view(node):
            return False
        node = operand(node, 0)
    return True
