"""Conditions by positions, which need no lanes: those whose boundaries no vector crosses.

>>> same_for_all_lanes(column_is_below_64, columns, 16)
True
"""

from __future__ import annotations

from ..graph.sizes import divides
from ..lower.index_expr import Div, Index, Mod, Var, is_one
from ..lower.ir import Expr


def comparisons(condition: Expr) -> list[Expr] | None:
    """The comparisons of positions of which a condition consists; None where there is something else."""
    if condition.op in ("and", "or", "not"):
        parts = [comparisons(a) for a in condition.args]
        return None if None in parts else [c for part in parts for c in part or ()]
    if condition.op not in ("lt", "le", "gt", "ge"):
        return None
    position, bound = condition.args
    fixed = bound.op in ("const", "index") and not bound.vars
    return [condition] if position.op == "index" and fixed else None


def same_for_all_lanes(condition: Expr, vector: Var, width: int) -> bool:
    """Whether a condition cannot change inside a vector: its boundary along the loop is a multiple of the
    width.
    """
    if vector not in condition.vars:
        return True
    if condition.op in ("and", "or", "not"):
        return all(same_for_all_lanes(a, vector, width) for a in condition.args)
    if condition.op not in ("lt", "ge"):
        return False
    index, bound = condition.args
    if index.op != "index" or bound.op not in ("const", "index") or bound.vars:
        return False
    position: Index = index.args[0]
    if not is_one(position.coefficient(vector)) or not position.is_affine:
        return False
    others = all(divides(width, c) for atom, c in position.terms.items() if atom is not vector)
    end = bound.args[0] if bound.op == "const" else bound.args[0].const
    return others and divides(width, end - position.const)


def stays_in_a_block(atom: Div | Mod, vector: Var, width: int) -> bool:
    """Whether no vector crosses a multiple of the divisor, where vectors begin at multiples of the width."""
    step = atom.base.terms.get(vector, 0)
    if type(step) is not int or step <= 0 or not atom.base.is_affine:
        return False
    others = (c for other, c in atom.base.terms.items() if other is not vector)
    return all(divides(step * width, n) for n in (atom.n, atom.base.const, *others))
