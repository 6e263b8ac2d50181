"""Which blocks of a mask show something, by the ends of its terms in each block instead of all places.

>>> mask_blocks("(q-k>=0)&(r0[b,k]-r0[b,q]==0)", (2, 16, 4096, 4096), device, documents)

A block that is called partly shown may show nothing; the kernel that computes it masks it place by place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .mask_text import PLACES, evaluated, names_in

BLOCK = 128  # queries and keys of a block
_EXACT = float(1 << 52)  # float64 holds integers up to here, and their sums and quotients
Tensors = Sequence[torch.Tensor]


class NoBounds(Exception):
    """The ends of a term are not known."""


class Term:
    """A number or condition of a mask in each block. of: which of q and k it depends on. exact: its values at
    all places, padded to whole blocks with the last one; of terms of both q and k there are the ends alone,
    [batch, head, blocks of queries, blocks of keys] in float64 (bool for a condition: shown everywhere, and
    somewhere).
    """

    def __init__(self, of: frozenset[str], exact: Any = None, ends: tuple[Any, Any] | None = None) -> None:
        self.of, self.exact, self._ends = of, exact, ends

    def ends(self) -> tuple[Any, Any]:
        """The least and the largest value in each block."""
        if self._ends is None:
            self._ends = (self.exact,) * 2 if isinstance(self.exact, int) else self._reduced()
        return self._ends

    def _reduced(self) -> tuple[Any, Any]:
        x, dim = self.exact, 2 if "q" in self.of else 3
        if x.dtype is not torch.bool:
            x = x.double()
        if self.of:
            tiled = x.unflatten(dim, (-1, BLOCK))
            low, high = tiled.amin(dim + 1), tiled.amax(dim + 1)
        else:
            low = high = x
        if x.dtype is torch.bool:
            return low, high
        return low.where(low > -_EXACT, -torch.inf), high.where(high < _EXACT, torch.inf)

    def apply(self, function: Callable[..., Any], ends: Callable[..., tuple[Any, Any]], *others: Any) -> Term:
        """The function of this term and others; ends: that of the ends of each."""
        terms = [self, *(t if isinstance(t, Term) else Term(frozenset(), t) for t in others)]
        of = frozenset[str]().union(*(term.of for term in terms))
        if len(of) < 2 and all(term.exact is not None for term in terms):
            return Term(of, function(*(term.exact for term in terms)))
        return Term(of, ends=ends(*(end for term in terms for end in term.ends())))

    def __add__(self, other: Any) -> Term:
        return self.apply(lambda x, y: x + y, lambda a, b, c, d: (a + c, b + d), other)

    def __sub__(self, other: Any) -> Term:
        return self.apply(lambda x, y: x - y, lambda a, b, c, d: (a - d, b - c), other)

    def __neg__(self) -> Term:
        return self.apply(lambda x: -x, lambda a, b: (-b, -a))

    def __rmul__(self, by: int) -> Term:
        if by == 0 and self.exact is not None:
            return Term(frozenset(), 0 * self.exact[:, :, :1, :1])
        return self.apply(lambda x: by * x, lambda a, b: (by * a, by * b))

    def __floordiv__(self, by: int) -> Term:
        return self.apply(lambda x: x // by, lambda a, b: ((a / by).floor(), (b / by).floor()))

    def __abs__(self) -> Term:
        return self.apply(torch.abs, lambda a, b: (torch.maximum(a, -b).clamp(min=0.0), torch.maximum(-a, b)))

    def __ge__(self, other: Any) -> Term:
        return (self - other).apply(lambda x: x >= 0, lambda a, b: (a >= 0, b >= 0))

    def __eq__(self, other: Any) -> Any:
        return (self - other).apply(lambda x: x == 0, lambda a, b: ((a == 0) & (b == 0), (a <= 0) & (b >= 0)))

    def __and__(self, other: Any) -> Term:
        return self.apply(lambda x, y: x & y, lambda a, b, c, d: (a & c, b & d), other)

    def __or__(self, other: Any) -> Term:
        return self.apply(lambda x, y: x | y, lambda a, b, c, d: (a | c, b | d), other)


def _whole_number(flag: Term) -> Term:
    if flag.exact is None:
        raise NoBounds
    return Term(flag.of, flag.exact.long())


def _read(tensor: torch.Tensor, at: tuple[Term | int, ...]) -> Term:
    of = frozenset[str]().union(*(i.of for i in at if isinstance(i, Term)))
    if len(of) > 1 or tensor.dtype not in (torch.int64, torch.int32, torch.bool):
        raise NoBounds  # floats have no ends where they are NaN; narrow integers wrap around
    return Term(of, tensor[tuple([i.exact if isinstance(i, Term) else i for i in at])])


def shown(mask: str, reads: Tensors, sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """The mask at all places: bool, [batch, heads, rows, length], 1 of those that it does not depend on."""
    used = names_in(mask)
    given: dict[str, Any] = {f"r{i}": read for i, read in enumerate(reads)}
    for d, (name, size) in enumerate(zip(PLACES, sizes, strict=True)):
        place = torch.arange(size if name in used else 1, dtype=torch.int32, device=device)
        given[name] = place.view([-1 if i == d else 1 for i in range(4)])
    found = evaluated(mask, given)
    return found.expand(*found.shape[:2], *sizes[2:])


def _by_ends(
    mask: str, reads: Tensors, sizes: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks show something, perhaps, and which show all. Raises NoBounds."""
    used = names_in(mask)
    given: dict[str, Any] = {f"r{i}": read for i, read in enumerate(reads)}
    counts = [(size + BLOCK - 1) // BLOCK for size in sizes[2:]]
    padded = [sizes[0] if "b" in used else 1, sizes[1] if "h" in used else 1, *(n * BLOCK for n in counts)]
    for d, name in enumerate(PLACES):
        place = torch.arange(padded[d], dtype=torch.int32, device=device)
        place = place.clamp(max=sizes[d] - 1).view([-1 if i == d else 1 for i in range(4)])
        given[name] = Term(frozenset(name) & {"q", "k"}, place)
    every, some = evaluated(mask, given, _read, {"abs": abs, "int": _whole_number}).ends()
    for d in (2, 3):  # blocks behind which there is none are never whole
        ends = (torch.arange(counts[d - 2], device=device) + 1) * BLOCK
        every = every & (ends <= sizes[d]).view([-1 if i == d else 1 for i in range(4)])
    return some.expand(*some.shape[:2], *counts), every.expand(*every.shape[:2], *counts)


def _by_places(
    mask: str, reads: Tensors, sizes: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_by_ends`, of all places."""
    shows = shown(mask, reads, sizes, device)
    down, across = ((n + BLOCK - 1) // BLOCK for n in shows.shape[2:])
    shows = torch.nn.functional.pad(shows, (0, across * BLOCK - sizes[3], 0, down * BLOCK - sizes[2]))
    tiled = shows.unflatten(3, (across, BLOCK)).unflatten(2, (down, BLOCK))
    count = tiled.sum((3, 5), dtype=torch.int32)
    return count > 0, count == BLOCK * BLOCK


def mask_blocks(
    mask: str, sizes: Sequence[int], device: torch.device, *reads: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Which blocks of a mask show something, of the tensors that the mask reads.

    Gives by rows two pairs of a count (int32, [batch or 1, heads or 1, blocks of one side]) and the numbers
    of that many blocks of the other side, in order, before zeros: of those that are masked place by place,
    and of those that show all. Where the mask reads tensors, [batch or 1, blocks] follows as one row: the
    places of the counts from the largest one to the smallest, so that no long row of blocks is begun last.
    The same by columns.
    """
    try:
        some, whole = _by_ends(mask, reads, sizes, device)
    except NoBounds:
        some, whole = _by_places(mask, reads, sizes, device)
    part = some & ~whole
    sides = [torch.stack((part, whole)), torch.stack((part.mT, whole.mT))]
    is_square = part.shape[2] == part.shape[3]
    found: list[torch.Tensor] = []
    for these in [torch.stack(sides)] if is_square else [side.unsqueeze(0) for side in sides]:
        counts, numbers = _listed(these)
        order = _longest_first(counts) if reads else None
        for n in range(len(these)):
            found += [counts[n, 0], numbers[n, 0], counts[n, 1], numbers[n, 1]]
            found += [] if order is None else [order[n]]
    return tuple(found)


def _listed(there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of each row are there, and which."""
    blocks = there.shape[-1]
    counts = there.cumsum(-1, dtype=torch.int32)
    nth = torch.arange(1, blocks + 1, dtype=torch.int32, device=there.device).repeat(*there.shape[:-1], 1)
    return counts[..., -1].contiguous(), torch.searchsorted(counts, nth, out_int32=True) % blocks


def _longest_first(counts: torch.Tensor) -> torch.Tensor:
    """[sides, batch * rows] of counts [sides, kinds, batch, heads, rows]."""
    longest = counts.sum(1, dtype=torch.int32).amax(2).flatten(1)
    return longest.argsort(descending=True, stable=True).to(torch.int32)
