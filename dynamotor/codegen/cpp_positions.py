"""Positions of largest and smallest values (argmax, argmin) in C++: each lane keeps the best value
that it has seen and its position; the lanes are compared behind the loop.

Of equal values the first position counts, and NaN is beyond every number, as in PyTorch. A position has 32
bits where the row is short enough, so that a vector holds as many positions as values of 32 bits.
"""

from __future__ import annotations

from ..graph.sizes import Dim
from ..lower.ir import F32, I32, I64, Kernel, Reduce, make
from .cpp_body import CppBody, CppScope
from .cpp_ops import ctype, reduce_start

UNSEEN = {I32: "0x7fffffff", I64: "0x7fffffffffffffffl"}  # beyond every position


def in_lanes(kernel: Kernel) -> bool:
    """Whether the positions of all reductions of a kernel step evenly along its innermost loop."""
    positions = [s.position for s in kernel.statements() if isinstance(s, Reduce) and s.position is not None]
    return (
        all(p.coefficient(kernel.inner[-1]) is not None for p in positions) if kernel.inner else not positions
    )


class Positions:
    """The accumulators of one reduction; count: positions that it can have, copies: unrolled blocks."""

    def __init__(self, s: Reduce, count: Dim, body: CppBody) -> None:
        self.s, self.body = s, body
        self.dtype = I32 if type(count) is int and count < 1 << 31 and s.expr.dtype in (F32, I32) else I64
        self.call = "more_" if s.kind == "argmax" else "less_"

    def declare(self, name: str, width: int) -> str:
        """An accumulator of as many lanes: the value `name`, and its position."""
        value, position = ctype(self.s.expr.dtype, width), ctype(self.dtype, width)
        start = reduce_start(self.s.kind, self.s.expr.dtype)
        return (
            f"{value} {name}=bc<{value}>({start});{position} {name}at=bc<{position}>({UNSEEN[self.dtype]});"
        )

    def track(self, name: str, scope: CppScope) -> str:
        """The value of one turn of the loop, beside the accumulator."""
        assert self.s.position is not None
        value = self.body.operand(self.s.expr, scope, scope.width)
        at = self.body.operand(make("index", (self.s.position,), self.dtype), scope, scope.width)
        return f"{self.call}({name},{name}at,{value},{at});"

    def join(self, total: str, name: str, width: int) -> str:
        """The lanes of an accumulator, beside one without lanes."""
        return f"for(int l_=0;l_<{width};l_++){self.call}({total},{total}at,{name}[l_],{name}at[l_]);"
