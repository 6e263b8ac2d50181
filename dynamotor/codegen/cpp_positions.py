"""Positions of largest and smallest values (argmax, argmin) in C++: each lane keeps the best value
that it has seen and its position; the lanes are compared behind the loop.

Of equal values the first position counts, and NaN is beyond every number, as in PyTorch. A position has 32
bits where the row is short enough, so that a vector holds as many positions as values of 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..graph.spec import numel
from ..lower.index_expr import Index, Var
from ..lower.ir import F32, I32, I64, Kernel, Phase, Reduce, make
from .cpp_body import CppBody, CppScope
from .cpp_ops import ctype, reduce_start

UNSEEN = {I32: "0x7fffffff", I64: "0x7fffffffffffffffl"}  # beyond every position


def in_lanes(kernel: Kernel) -> bool:
    """Whether the positions of all reductions of a kernel step evenly along its innermost loop."""
    positions = [s.position for s in kernel.statements() if isinstance(s, Reduce) and s.position is not None]
    return (
        all(p.coefficient(kernel.inner[-1]) is not None for p in positions) if kernel.inner else not positions
    )


def without_tracked(phase: Phase) -> tuple[Phase, list[tuple[Reduce, int]]]:
    """A pass without the extremes whose positions it looks for, and these, each with the id of the reduction
    that holds them, too.
    """
    reductions = [s for s in phase.inner if isinstance(s, Reduce) and not s.across]
    tracked = [
        (s, p.id)
        for s in reductions
        for p in reductions
        if p.position is not None and p.kind == f"arg{s.kind}" and p.expr is s.expr
    ]
    known = {s.id: s for s, _ in tracked}
    inner = tuple(s for s in phase.inner if not isinstance(s, Reduce) or s.id not in known)
    return replace(phase, inner=inner), [*{s.id: (s, holder) for s, holder in tracked}.values()]


class Positions:
    """The accumulators of one reduction."""

    def __init__(self, s: Reduce, loops: Sequence[Var], body: CppBody) -> None:
        self.s, self.body, count = s, body, numel(v.size for v in loops)
        self.dtype = I32 if type(count) is int and count < 1 << 31 and s.expr.dtype in (F32, I32) else I64
        self.call = "more_" if s.kind == "argmax" else "less_"
        # Then no later position replaces an equal value's, and 0 is right where no value is beyond the start.
        self.in_order = len(loops) == 1 and s.position == Index.of(loops[0])

    def declare(self, name: str, width: int) -> str:
        """An accumulator of as many lanes: the value `name`, and its position."""
        value, position = ctype(self.s.expr.dtype, width), ctype(self.dtype, width)
        start = reduce_start(self.s.kind, self.s.expr.dtype)
        unseen = 0 if self.in_order else UNSEEN[self.dtype]
        return f"{value} {name}=bc<{value}>({start});{position} {name}at=bc<{position}>({unseen});"

    def track(self, name: str, scope: CppScope) -> str:
        """The value of one turn of the loop, beside the accumulator."""
        assert self.s.position is not None
        value = self.body.operand(self.s.expr, scope, scope.width)
        at = self.body.operand(make("index", (self.s.position,), self.dtype), scope, scope.width)
        call = f"{self.call}next_" if self.in_order else self.call
        return f"{call}({name},{name}at,{value},{at});"

    def join(self, total: str, names: Mapping[str, int]) -> str:
        """All accumulators in the one without lanes: of equal widths by vectors, then the best lane."""
        lines, first = "", dict[int, str]()
        for name, width in names.items():
            if first.setdefault(width, name) != name:
                lines += f"{self.call}({first[width]},{first[width]}at,{name},{name}at);"
        return lines + "".join(
            f"{self.call}{'across_' if width > 1 else ''}({total},{total}at,{name},{name}at);"
            for width, name in first.items()
        )
