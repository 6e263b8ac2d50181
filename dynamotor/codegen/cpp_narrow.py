"""Vectors of 8- and 16-bit elements, for maps and extremes whose values need no more: four or two times the
lanes of vectors of floats.

A store keeps the low bits of a value. Sums, products and logic need only the low bits of their operands;
comparisons, maxima and minima need operands that are numbers of the element type (`_EXACT`). Halves are
moved, chosen and negated as bits.

>>> narrow_lanes(kernel, 16)     # of `uint8 + uint8`, by lanes of 32 bits
NarrowLanes(64, "u8")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..lower.index_expr import Index, Var
from ..lower.ir import BOOL, F32, I32, Expr, Kernel, Reduce, Store
from ..lower.whole_ranges import OPS_WITH_RANGES, Range, range_of_op
from .lane_conditions import same_for_all_lanes

_ELEMENTS: dict[str, tuple[str, int, Range, tuple[torch.dtype, ...]]] = {
    # element: vector type, bytes, numbers that it holds, memory types beside bool
    "u8": ("B", 1, (0, 255), (torch.uint8,)),
    "i8": ("C", 1, (-128, 127), (torch.int8,)),
    "i16": ("H", 2, (-(1 << 15), (1 << 15) - 1), (torch.int16,)),
    "bf16": ("H", 2, (0, -1), (torch.bfloat16,)),
    "f16": ("H", 2, (0, -1), (torch.float16,)),
}
_EXACT = {
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "max",
    "min",
    "abs",
}  # need the operands' values, not only their low bits
_MASKS = {"and", "or", "xor", "not", "eq", "ne"}  # of BOOL operands
_OF_HALVES = {"load", "const", "neg", "abs", "copysign", "select", "masked", "round_to"}
# The same operations on the bits of halves.
BITS = {"neg": "{0}^(short)0x8000", "abs": "{0}&0x7fff", "copysign": "({0}&0x7fff)|({1}&(short)0x8000)"}


class NarrowLanes(int):
    """A number of lanes whose elements are narrower than a float."""

    element: str

    def __new__(cls, lanes: int, element: str) -> NarrowLanes:
        made = super().__new__(cls, lanes)
        made.element = element
        return made

    def bits(self, half: float) -> int:
        """A number as the element holds it."""
        dtype = _ELEMENTS[self.element][3][0]
        return int(torch.tensor(half, dtype=F32).to(dtype).view(torch.int16))

    def neutral(self, kind: str) -> str:
        """The number that a maximum ("max") or a minimum ("min") of elements begins with."""
        return str(_ELEMENTS[self.element][2][kind == "min"])

    @property
    def vector(self) -> str:
        """The vector type's name, without its number of lanes."""
        return _ELEMENTS[self.element][0]


def narrow_lanes(kernel: Kernel, floats: int) -> NarrowLanes | None:
    """The lanes for the innermost loop of a kernel whose vectors hold so many floats; None where values, or
    loads across the memory, need the vectors of 32 bits.
    """
    inner = [s for phase in kernel.phases for s in phase.inner]
    gathers = {s.id: s for s in inner if isinstance(s, Reduce)}
    statements = [*inner, *kernel.final] if gathers else list(kernel.statements())
    stores = [s for s in statements if isinstance(s, Store) and not s.add]
    size = kernel.inner[-1].size if kernel.inner else 0
    if len(stores) + len(gathers) < len(statements) or type(size) is not int:
        return None
    if not all(_is_extreme(s, kernel) for s in gathers.values()):
        return None
    v = kernel.inner[-1]
    exprs = _computed([*(s.expr for s in gathers.values()), *(s.expr for s in stores)])
    used = {s.memory for s in stores} | {e.args[-1] for e in exprs if e.op == "load"}
    for element, (_, nbytes, held, memories) in _ELEMENTS.items():
        lanes = floats * 4 // nbytes
        whole = size % lanes == 0 if kernel.template == "cols" else size >= lanes
        if used <= {BOOL, *memories} and whole:
            in_vectors = all(_steps_evenly(s.index, v, (0, 1)) for s in stores) and all(
                _has_vectors(e, v, lanes) for e in exprs
            )
            kept = all(_keeps_bits(e, nbytes, memories) for e in exprs)
            exact = in_vectors and kept and _is_exact(exprs, held, gathers)
            return NarrowLanes(lanes, element) if exact else None
    return None


def _is_extreme(s: Reduce, kernel: Kernel) -> bool:
    """Whether a reduction is a maximum or minimum of integers in registers."""
    in_registers = kernel.template == "cols" or not s.across
    return s.kind in ("max", "min") and s.position is None and s.expr.dtype is I32 and in_registers


def _computed(roots: Iterable[Expr]) -> list[Expr]:
    """Every distinct expression under the roots, operands first, without positions in memory and conditions
    by positions: those are computed outside of the vectors.
    """
    found: dict[Expr, None] = {}

    def visit(e: Expr) -> None:
        operands = e.args[1:] if e.op == "masked" else e.args
        for a in operands if e.op != "load" else ():
            if isinstance(a, Expr) and a not in found:
                visit(a)
        found[e] = None

    for root in roots:
        if root not in found:
            visit(root)
    return list(found)


def _has_vectors(e: Expr, v: Var, lanes: int) -> bool:
    """Whether e has a form without a loop over the lanes."""
    if e.op == "load":
        return _steps_evenly(e.args[1], v, (0, 1) if e.dtype is BOOL else (0, 1, 2, -1))
    return e.op != "masked" or same_for_all_lanes(e.args[0], v, lanes)


def _keeps_bits(e: Expr, nbytes: int, memories: tuple[torch.dtype, ...]) -> bool:
    """Whether a value's trip through a memory type changes no bit of the element: halves of their own type,
    integers of at least as many bits.
    """
    if e.op != "round_to":
        return True
    memory: torch.dtype = e.args[1]
    return memory in memories if e.dtype is F32 else memory is not BOOL and memory.itemsize >= nbytes


def _steps_evenly(index: Index, v: Var, steps: tuple[int, ...]) -> bool:
    step = index.coefficient(v)
    return type(step) is int and step in steps


def _is_exact(exprs: Iterable[Expr], held: Range, gathers: Mapping[int, Reduce]) -> bool:
    """Whether low bits are enough for all that is computed, operands of `_EXACT` and of `gathers`, the
    extremes by number, being numbers in `held`.
    """
    ranges: dict[Expr, Range | None] = {}  # of I32 values; None: unknown
    inside = lambda r: r is not None and held[0] <= r[0] and r[1] <= held[1]  # noqa: E731
    for e in exprs:
        operands = [a for a in e.args if isinstance(a, Expr)]
        if e.dtype is F32:
            if e.op not in _OF_HALVES:
                return False
            continue
        if e.op == "masked":
            operands = operands[1:]
        if e.dtype not in (I32, BOOL) or e.op not in _ALLOWED:
            return False
        if any(a.dtype is BOOL for a in operands) and e.op not in (*_MASKS, "cast", "select", "masked"):
            return False
        whole = [a for a in operands if a.dtype is I32]
        asked = e.op in _EXACT or e.op == "cast" and e.dtype is BOOL
        if len(whole) + sum(a.dtype is BOOL for a in operands) < len(operands):
            return False  # operands of other types
        if asked and not all(inside(ranges[a]) for a in whole):
            return False
        if e.op == "acc":
            ranges[e] = ranges[gathers[e.args[0]].expr]
        elif e.dtype is I32:
            ranges[e] = range_of_op(e, [ranges[a] for a in whole])
    return all(inside(ranges[s.expr]) for s in gathers.values())


_ALLOWED = {*(OPS_WITH_RANGES - {"shr"}), *_EXACT, *_MASKS, "load", "const", "cast", "round_to", "acc"}
