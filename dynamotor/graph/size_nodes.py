"""Sizes as nodes of a graph: an expression becomes calls of Python operators on the symbols' placeholders.

>>> writer = SizeNodes(graph); writer.bind(s0, placeholder); writer.node(s0 * 4 + 1)
add
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from .sizes import Atom, Size, Symbol, mapped, size

_CALLS: dict[str, Callable[..., Any]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "min": torch.sym_min,
    "max": torch.sym_max,
}


def is_size(node: torch.fx.Node) -> bool:
    """Whether a node gives a size (a plain int at run time)."""
    return type(node.meta.get("val")) is Size


class SizeNodes:
    """Writes size expressions into a graph, each once, where the graph is being written."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.symbols: dict[Symbol, torch.fx.Node] = {}
        self._made: dict[Size, torch.fx.Node] = {}

    def bind(self, symbol: Size, node: torch.fx.Node) -> None:
        """The placeholder whose value at a call is the symbol's."""
        (only,) = symbol.symbols
        self.symbols[only] = node

    def node(self, value: Size) -> torch.fx.Node:
        """The node of an expression."""
        made = self._made.get(value)
        if made is None:
            terms = [self._product(value, monomial, c) for monomial, c in value.terms.items()]
            made = self._made[value] = functools.reduce(lambda a, b: self._call(operator.add, a, b), terms)
        return made

    def nodes(self, value: Any) -> Any:
        """Arguments with nodes in the place of sizes."""
        return mapped(lambda v: self.node(v) if type(v) is Size else v, value)

    def _product(self, whole: Size, monomial: tuple[Atom, ...], c: int) -> Any:
        factors: list[Any] = [self._atom(atom) for atom in monomial]
        if c != 1 or not factors:
            factors.append(c)
        return functools.reduce(lambda a, b: self._call(operator.mul, a, b), factors)

    def _atom(self, atom: Atom) -> torch.fx.Node:
        if type(atom) is Symbol:
            return self.symbols[atom]
        return self._call(
            _CALLS[atom.kind], *[self._operand(operand) for operand in (atom.a, atom.b)], val=atom
        )

    def _operand(self, value: Size) -> Any:
        plain = size(value.terms, value.env)
        return self.node(plain) if type(plain) is Size else plain

    def _call(self, target: Callable[..., Any], *args: Any, val: Atom | None = None) -> torch.fx.Node:
        node = self.graph.create_node("call_function", target, args)
        values = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
        node.meta["val"] = target(*values) if val is None else Size({(val,): 1}, val.env)
        return node
