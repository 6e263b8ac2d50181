"""Reading the nodes of an aten graph: an unexpected kind of node is an InternalError, at
that node. And walks over graphs with a stack of their own: chains are longer than Python's stack is deep.

>>> operand(node, 0), overload(node), spec_of(node)
(arg0_1, <OpOverload(op='aten.t', overload='default')>, TensorSpec(...))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn, TypeVar

from torch import fx

from ..base.compat import OpOverload
from ..base.errors import InternalError
from .spec import TensorSpec

T = TypeVar("T")


def reached(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """What one comes to from these, these with it."""
    found: set[T] = set()
    todo = list(start)
    while todo:
        item = todo.pop()
        if item not in found:
            found.add(item)
            todo.extend(following(item))
    return found


def in_order(start: Iterable[T], needs: Callable[[T], Iterable[T]]) -> list[T]:
    """The same, each behind its operands; the last of `start` is looked at first."""
    placed: dict[T, None] = {}
    stack = [(item, False) for item in start]
    while stack:
        item, ready = stack.pop()
        if ready:
            placed[item] = None
        elif item not in placed:
            stack.append((item, True))
            stack.extend((each, False) for each in needs(item) if each not in placed)
    return list(placed)


def wrong(node: fx.Node, what: str, stage: str = "aten") -> NoReturn:
    """Refuse a graph that must not be."""
    raise InternalError(
        "DM902",
        f"the {stage} graph is wrong at `{node.format_node()}`: {what}",
        where=node.meta.get("where"),
        cure="this is a bug in dynamotor: please report it",
    )


def operand(node: fx.Node, position: int) -> fx.Node:
    """The node that is an argument."""
    found = node.args[position]
    return (
        found if isinstance(found, fx.Node) else wrong(node, f"argument {position} is no value of the graph")
    )


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments, for passes that know their kinds from the op's schema: nodes, numbers, lists
    of them, None.
    """
    return node.args


def operands(node: fx.Node, position: int) -> list[Any] | tuple[Any, ...]:
    """The argument that is a list."""
    found = node.args[position]
    return found if isinstance(found, list | tuple) else wrong(node, f"argument {position} is no list")


def overload(node: fx.Node) -> OpOverload:
    """The aten op that a node calls."""
    target = node.target
    return target if isinstance(target, OpOverload) else wrong(node, "not a call of an op")


def function(node: fx.Node) -> Callable[..., Any]:
    """The Python function that a node calls (operator.getitem, arithmetic on numbers)."""
    return wrong(node, "not a call of a function") if isinstance(node.target, str) else node.target


def find_spec(value: Any) -> TensorSpec | None:
    """The TensorSpec of a node with one tensor result; None for anything else."""
    spec = value.meta.get("val") if isinstance(value, fx.Node) else None
    return spec if isinstance(spec, TensorSpec) else None


def spec_of(node: Any) -> TensorSpec:
    """The TensorSpec of a node that has one tensor result."""
    spec = node.meta.get("val")
    return spec if isinstance(spec, TensorSpec) else wrong(node, "its result is not one tensor")


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op's call by name, with the schema's defaults."""
    given = {argument.name: argument.default_value for argument in overload(node)._schema.arguments}
    return given | dict(zip(given, node.args, strict=False)) | node.kwargs


def take_place(new: fx.Node, *old: fx.Node) -> None:
    """Let a node stand for the first of these, and erase them: each is read by those before it alone."""
    old[0].replace_all_uses_with(new)
    for node in old:
        node.graph.erase_node(node)


def move_before(graph: fx.Graph, moved: Collection[fx.Node], target: Any) -> None:
    """Put each of these nodes before the first call of `target` behind its operands."""
    waiting = [node for node in graph.nodes if node in moved]
    done: dict[fx.Node, None] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is target:
            for each in waiting:
                if done.keys() >= set(each.all_input_nodes):
                    done[each] = None
            waiting = [each for each in waiting if each not in done]
        done[node] = None
    for before, node in itertools.pairwise(done):
        if before.next is not node:
            before.append(node)


def needed_for(wanted: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that these depend on, these with them."""
    return reached(wanted, lambda node: node.all_input_nodes)
