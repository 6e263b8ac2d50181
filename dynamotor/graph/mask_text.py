"""A mask's formula as text, so that an op can take it as an argument and a cache can keep it.

>>> q, k = Position("q", 8), Position("k", 8)
>>> text_of(at_least(affine(q) - affine(k)), [])
'q>=k'
>>> evaluated("q-k>=0", {"q": 3, "k": 5})
False

Positions are called b, h, q and k; r0, r1, ... are the tensors that the formula reads. A text is a Python
expression, but `evaluated` runs only the few forms that `text_of` writes.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .index_formulas import Affine, All, Condition, Fact, Magnitude, NoFormula, Position, Quotient, Read, Some

PLACES = ("b", "h", "q", "k")
_SIDES = {"q", "k"}


def text_of(condition: Condition, reads: Sequence[Any]) -> str:
    """The text of a condition. reads: the nodes of tensors that it may read. Raises NoFormula where it
    depends on a size that differs between calls.
    """
    if isinstance(condition, (All, Some)):
        sign = "&" if type(condition) is All else "|"
        return sign.join(sorted(f"({text_of(part, reads)})" for part in condition.parts))
    if type(condition) is Fact:
        left, right = _by_sides(condition.of, reads)
        if condition.kind == "==" and all(c < 0 for _, c in left.terms):
            left, right = -left, -right
        return f"{_sum(left, reads)}{condition.kind}{_sum(right, reads)}"
    raise NoFormula


def _by_sides(of: Affine, reads: Sequence[Any]) -> tuple[Affine, Affine]:
    """A sum that is compared with 0, as its terms of the query and those of the key, to be compared: a kernel
    computes each once a row or column of its tile, and has one instruction left for each place.
    """
    keys: set[tuple[Any, int]] = set()
    rest: set[tuple[Any, int]] = set()
    for term in of.terms:
        sides = _SIDES & names_in(_atom(term[0], reads))
        if sides == _SIDES:
            return of, Affine(frozenset(), 0)
        (keys if "k" in sides else rest).add(term)
    if not keys or not rest:
        return of, Affine(frozenset(), 0)
    return Affine(frozenset(rest), 0), -Affine(frozenset(keys), of.constant)


def _sum(value: Affine, reads: Sequence[Any]) -> str:
    terms = sorted(((_atom(atom, reads), c) for atom, c in value.terms), key=lambda t: (t[1] < 0, t))
    text = "".join(f"{'-' if c < 0 else '+'}{'' if abs(c) == 1 else f'{abs(c)}*'}{atom}" for atom, c in terms)
    if value.constant or not terms:
        text += f"{value.constant:+d}"
    return text.removeprefix("+")


def _atom(atom: Any, reads: Sequence[Any]) -> str:
    kind = type(atom)
    if kind is Position and atom.name in PLACES:
        return str(atom.name)
    if kind is Quotient:
        return f"(({_sum(atom.of, reads)})//{atom.by})"
    if kind is Magnitude:
        return f"abs({_sum(atom.of, reads)})"
    if kind is Read:
        # Numbers alone would make an element of no dimensions.
        alone = not any(i.terms for i in atom.at)
        at = ",".join(f"0*k{i.constant:+d}" if alone else _sum(i, reads) for i in atom.at)
        text = f"r{reads.index(atom.node)}[{at}]"
        return f"int({text})" if atom.is_condition else text
    raise NoFormula


_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.USub: operator.neg,
}
_FUNCTIONS = {"abs": torch.abs, "int": lambda flag: torch.where(flag, 1, 0)}


def names_in(text: str) -> set[str]:
    """The positions and tensors that a text speaks of."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} - _FUNCTIONS.keys()


def evaluated(
    text: str,
    given: Mapping[str, Any],
    index: Callable[[Any, Any], Any] = operator.getitem,
    functions: Mapping[str, Callable[[Any], Any]] = _FUNCTIONS,
) -> Any:
    """The text's value. given: numbers, tensors or nodes of a trace by name; index: how a tensor is read."""

    def value(node: Any) -> Any:
        return _value(node, given, value, index, functions)

    return value(ast.parse(text, mode="eval").body)


def _value(
    node: Any, given: Mapping[str, Any], value: Callable[[Any], Any], index: Any, functions: Mapping[str, Any]
) -> Any:
    match node:
        case ast.Name():
            return given[node.id]
        case ast.Constant():
            return node.value
        case ast.UnaryOp():
            return _OPERATORS[type(node.op)](value(node.operand))
        case ast.BinOp():
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        case ast.Compare(ops=[sign], comparators=[other]):
            return _OPERATORS[type(sign)](value(node.left), value(other))
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return functions[name](value(argument))
        case ast.Subscript(slice=ast.Tuple(elts=at)):
            return index(value(node.value), tuple(map(value, at)))
        case ast.Subscript():
            return index(value(node.value), (value(node.slice),))
    raise ValueError(f"no part of a mask: {ast.dump(node)}")
