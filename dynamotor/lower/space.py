"""Matching iteration spaces: which loop variables of a fused nest stand for those of a node that touches the
same memory.

>>> t = (Var("t0", 512), Var("t1", 768)); r = (Var("i0", 393216),)
>>> match(flat(t), flat(r), t, r)      # the node's one variable is 768*t0 + t1
{i0: 768*t0 + t1}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph.sizes import Dim, divides, equal, hint, known
from ..graph.spec import numel
from .index_expr import ZERO, Atom, Index, Var, row_major


@dataclass(frozen=True, slots=True)
class Split:
    """The nest's variable has to be split into (high, low) with `low` values in the low part before they
    match.
    """

    var: Var
    low: Dim


Env = dict[Var, Index]


def _digits(index: Index) -> list[tuple[Dim, Var]] | None:
    """(step, variable), smallest step first, when they are the digits of a mixed-radix number; else None."""
    if not index.is_affine:
        return None
    terms = sorted(
        ((c, a) for a, c in index.terms.items() if isinstance(a, Var)), key=lambda term: hint(term[0])
    )
    end: Dim = 1
    for step, var in terms:
        if not known(">=", step - end):
            return None
        end = step * var.size
    return terms


def match(nest: Index, node: Index, nest_vars: Sequence[Var], own: Sequence[Var]) -> Env | Split | None:
    """Express the node's variables `own` through `nest_vars` so that its access `node` becomes the access
    `nest`.

    Variables that neither access names are paired row-major. None: there is no such pairing.
    """
    if not equal(nest.const, node.const):
        return None
    found = _match_digits(nest, node)
    if not isinstance(found, dict):
        return found
    used = nest.vars()
    left_nest = [v for v in nest_vars if not v.single and v not in used]
    left_own = [v for v in own if not v.single and v not in found]
    if left_own:
        if not equal(numel(v.size for v in left_nest), numel(v.size for v in left_own)):
            return None
        rest = _match_digits(row_major(left_nest), row_major(left_own))
        if not isinstance(rest, dict):
            return rest
        found.update(rest)
    for v in own:
        if v.single:
            found[v] = ZERO
    return found


def _match_digits(nest: Index, node: Index) -> Env | Split | None:
    theirs, ours = _digits(nest), _digits(node)
    if theirs is None or ours is None:
        return None
    env: Env = {}
    at = 0
    for step, var in ours:
        covered: Dim = 1
        value: dict[Atom, Dim] = {}
        while not equal(covered, var.size):
            if at == len(theirs):
                return None
            s, t = theirs[at]
            if not equal(s, step * covered) or not divides(covered, var.size):
                return None
            room = var.size // covered
            if not divides(t.size, room):
                return Split(t, room) if divides(room, t.size) else None
            value[t] = covered
            covered = covered * t.size
            at += 1
        env[var] = Index(value)
    return env if at == len(theirs) else None
