"""Which integers an expression can be, from the memory types that it reads.

>>> range_of(load_of_int8)                    # (-128, 127)
>>> range_of_op(bitwise_and, [(-128, 127), (15, 15)])      # (0, 15)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Range = tuple[int, int]


class Expression(Protocol):
    """An expression of `ir`, which imports this module."""

    @property
    def op(self) -> str: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def range_of_op(e: Expression, operands: Sequence[Range | None]) -> Range | None:
    """The numbers of `e`, of a compute type of integers, over operands in these ranges; None: unknown."""
    if e.op == "const":
        return int(e.args[0]), int(e.args[0])
    if e.op in ("load", "round_to"):
        info = torch.iinfo(e.args[-1]) if e.args[-1] is not torch.bool else None
        return (info.min, info.max) if info else None
    if e.op == "cast":
        return (0, 1) if e.args[0].dtype is torch.bool else None
    if e.op == "float8":
        return 0, 255
    known = [r for r in operands if r is not None]
    rule = _RANGES.get(e.op)
    found = rule(*known) if rule is not None and len(known) == len(operands) else None
    held = torch.iinfo(e.dtype)  # beyond, a value wraps
    return found if found is not None and held.min <= found[0] and found[1] <= held.max else None


def range_of(e: Expression, depth: int = 8) -> Range | None:
    """The numbers of an expression of integers; None where they are unknown, or the expression is deep."""
    if e.dtype.is_floating_point or e.dtype is torch.bool or not depth:
        return None
    if e.op in ("const", "load", "round_to", "cast", "float8"):
        return range_of_op(e, ())
    operands = e.args[1:] if e.op in ("select", "masked") else e.args
    if e.op not in _RANGES or not all(_is_whole(a) for a in operands):
        return None
    return range_of_op(e, [range_of(a, depth - 1) for a in operands])


def _is_whole(a: Any) -> bool:
    return hasattr(a, "dtype") and not a.dtype.is_floating_point and a.dtype is not torch.bool


def _union(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])


def _product(a: Range, b: Range) -> Range:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _common_bits(a: Range, b: Range) -> Range | None:
    """A number without sign bounds the bits that two have in common."""
    ends = [r[1] for r in (a, b) if r[0] >= 0]
    return (0, min(ends)) if ends else None


def _shifted(a: Range, by: Range) -> Range | None:
    return (a[0] >> by[0], a[1] >> by[0]) if 0 <= by[0] == by[1] else None


_RANGES: dict[str, Callable[..., Range | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (0, max(abs(a[0]), abs(a[1]))),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "select": _union,
    "masked": _union,
    "bitnot": lambda a: (~a[1], ~a[0]),
    "and": _common_bits,
    "shr": _shifted,
}
OPS_WITH_RANGES = frozenset(_RANGES)
