"""Long rows gone through in whole vectors of 16 bytes, wherever they start: 50,257 bfloat16 apart, say.

    | . . . a b c d e | f g h i j k l m | ... | w x y z . . . . |    vectors in memory; a row from a to z
              edge          loop            loop      edge

A loop takes the vectors inside the row without a mask. The edge, one more tile, takes the vectors in
which the row starts and ends: it reads them whole, ignores elements of other rows, and writes element by
element there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..graph.spec import contiguous_stride
from ..lower.index_expr import Index, Var
from ..lower.ir import Kernel, Store, loaded_exprs, roots, walk
from .triton_ops import lines_of

VECTOR = 16  # bytes


@dataclass(frozen=True, slots=True)
class Vectors:
    """Tiles of rows that start at vectors in memory.

    unit: elements of a vector. start: the position of a row's first element, modulo the unit. itemsize: of
    such elements.
    """

    unit: int
    start: Index
    along: tuple[Var, ...]
    itemsize: int

    def covers(self, index: Index) -> bool:
        """Whether an access goes through the row, and a tile's start is a vector's start in it."""
        return _start(index, self.along, self.unit) == self.start

    def whole(self, memory: torch.dtype) -> bool:
        """Whether vectors of this type are 16 bytes long, so that a part of one inside an allocation means
        all of it.
        """
        return memory.itemsize == self.itemsize

    @property
    def lead(self) -> Index:
        """How many elements of a row come before the first vector that starts in it, modulo the unit."""
        return Index({v: -c % self.unit for v, c in self.start.terms.items()}, -self.start.const % self.unit)

    def inside(self, size: int, block: int) -> int:
        """Elements of a row of this size that the loop takes, whatever the row's start."""
        return (size - self.unit + 1) // block * block

    def steps(self, size: int, block: int, chunks: int, per_chunk: int) -> tuple[str, str]:
        """Bounds of the loop, and of the loop over the edge's tiles (one, as a rule). Of several chunks the
        last has the edge.
        """
        inside = self.inside(size, block)
        edge = self.unit + size - inside
        if chunks == 1:
            return f"0, {inside}, {block}", f"0, {edge}, {block}"
        first = f"tl.where(chunk == {chunks - 1}, 0, {-(-edge // block) * block})"
        return (
            f"chunk * {per_chunk}, tl.minimum((chunk + 1) * {per_chunk}, {inside}), {block}",
            f"{first}, {edge}, {block}",
        )

    def edge(self, size: int, lanes: int) -> list[str]:
        """Lines for the edge: `r` and its vectors' first positions `r_first`; of a vector `r_some` or `r_all`
        is the row's.
        """
        inside = self.inside(size, lanes)
        return lines_of(f"""
            edge = base + tl.arange(0, {lanes})[None, :]
            r_first = edge // {self.unit} * {self.unit}
            r_first = tl.where(r_first == 0, lead - {self.unit}, lead + r_first + {inside - self.unit})
            r = r_first + edge % {self.unit}
            r_in = (r >= 0) & (r < {size})
            r_some = (r_first > -{self.unit}) & (r_first < {size}) if ALIGNED else r_in
            r_all = (r_first >= 0) & (r_first <= {size - self.unit})
        """)

    def place(self, at: str, edge: bool) -> str:
        """A position with facts that the compiler cannot infer."""
        if edge:
            at = f"tl.max_contiguous({at}, [1, {self.unit}])"
        return f"tl.multiple_of({at}, [1, {self.unit}])"


def _start(index: Index, along: Sequence[Var], unit: int) -> Index | None:
    """Where an access to a whole row starts, modulo the unit; None when it does not go through the row in
    order.
    """
    terms = dict(index.terms)
    loops = [v for v in along if v.size > 1]
    for v, step in zip(loops, contiguous_stride([v.size for v in loops]), strict=True):
        if terms.pop(v, 0) != step:
            return None
    start = Index({a: c % unit for a, c in terms.items()}, index.const % unit)
    crosses = Index(terms, 0).vars() & set(loops)
    return start if loops and not crosses and not any(loaded_exprs(start)) else None


def vectors_of(kernel: Kernel, along: Sequence[Var]) -> Vectors | None:
    """The vectors of most of the bytes that a kernel moves along its rows; stores decide between equals."""
    seen = [
        (e.args[1], e.args[2], False) for s in kernel.statements() for e in walk(*roots(s)) if e.op == "load"
    ]
    seen += [(s.index, s.memory, True) for s in kernel.statements() if isinstance(s, Store)]
    accesses = [access for access in dict.fromkeys(seen) if _start(access[0], along, VECTOR) is not None]
    if not accesses:
        return None
    itemsize = min(memory.itemsize for _, memory, _ in accesses)
    unit = VECTOR // itemsize
    weight: dict[Index, tuple[int, bool]] = {}
    for index, memory, stored in accesses:
        start = _start(index, along, unit)
        assert start is not None  # as modulo all of a vector
        nbytes, any_stored = weight.get(start, (0, False))
        weight[start] = (nbytes + memory.itemsize, any_stored or stored)
    return Vectors(unit, max(weight, key=lambda start: weight[start]), tuple(along), itemsize)
