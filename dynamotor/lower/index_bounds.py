"""The ends of an index by trying values of its variables, where bounds of sums take each term's worst and so
say too little.

>>> ends(7 * t6 + 50 * ((t7 + 3) // 7), ((7 * t6 + t7, (0, 52)),))  # t6 < 8, t7 < 7
(0, 99)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..graph.sizes import Dim
from ..graph.spec import numel
from .index_expr import Bounds, Div, Index, Loaded, Mod, Var

Facts = tuple[tuple[Index, Bounds], ...]  # bounds of sums of terms (without a constant), both included
Free = Var | Loaded  # what values are chosen for
MOST = 1 << 20  # places that are looked at for variables that belong together


def ends(index: Index, facts: Facts) -> Bounds | None:
    """Smallest and largest value of an index where the facts hold; (0, -1) where they never do, None for
    sizes that are no numbers.

    Variables that no atom and no fact joins are tried apart: those of a batch and of channels do not multiply
    the places. Where more than `MOST` are left, values between both ends of each variable are looked at, so
    that the found bounds are met, but the ends may be further out.
    """
    low = high = index.const
    for part, known in _apart(index, facts):
        found = _met(part, known)
        if found is None or found[0] > found[1]:
            return found
        low, high = low + found[0], high + found[1]
    return low, high


def _apart(index: Index, facts: Facts) -> list[tuple[Index, Facts]]:
    """Terms of an index and facts in groups that share no variable; the sum of all is the index without its
    constant.
    """
    terms = [(Index({atom: c}), ()) for atom, c in index.terms.items()]
    groups: list[tuple[set[Free], Index, Facts]] = []
    for part, known in [*terms, *((Index({}), (fact,)) for fact in facts)]:
        free = {v for form in (part, *(form for form, _ in known)) for v in _free(form)}
        for group in [g for g in groups if g[0] & free]:
            groups.remove(group)
            free, part, known = free | group[0], part + group[1], known + group[2]
        groups.append((free, part, known))
    return [(part, known) for _, part, known in groups]


def _free(form: Index) -> Iterator[Free]:
    for atom in form.terms:
        if isinstance(atom, (Div, Mod)):
            yield from _free(atom.base)
        else:
            yield atom


def _met(index: Index, facts: Facts) -> Bounds | None:
    free = sorted({v for form in (index, *(f for f, _ in facts)) for v in _free(form)}, key=str)
    sizes = [v.size for v in free]
    if any(type(n) is not int for n in sizes):
        return None
    grid = torch.meshgrid([_chosen(int(n), sizes) for n in sizes], indexing="ij") if free else ()
    places = dict(zip(free, grid, strict=True))
    met = torch.ones(grid[0].shape if free else (), dtype=torch.bool)
    for form, (low, high) in facts:
        value = _value(form, places)
        met &= (value >= low) & (value <= high)
    found = _value(index, places).expand(met.shape)[met]
    return (int(found.min()), int(found.max())) if found.numel() else (0, -1)


def _chosen(size: int, sizes: list[Dim]) -> torch.Tensor:
    """All values of a variable, or so many that those of all are no more than `MOST` places."""
    many = size
    if numel(sizes) > MOST:
        many = min(size, max(2, int(MOST ** (1 / len(sizes)))))
    return torch.linspace(0, size - 1, many, dtype=torch.float64).round().long()


def _value(form: Index, places: Mapping[Free, torch.Tensor]) -> torch.Tensor:
    """A form at all places."""
    total = torch.tensor(int(form.const))
    for atom, c in form.terms.items():
        if isinstance(atom, (Div, Mod)):
            base = _value(atom.base, places)
            value = base // int(atom.n) if isinstance(atom, Div) else base % int(atom.n)
        else:
            value = places[atom]
        total = total + int(c) * value
    return total
