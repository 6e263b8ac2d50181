"""Long sums of floats in C++: after a strip of additions the accumulators go into totals, which keep what
each addition loses (Kahan, "Further remarks on reducing truncation errors", 1965).

A sum of n equal numbers in one accumulator is wrong by n/4 units in the last place or so, since every
addition rounds in the same direction; here it stays within those of one strip, as in eager.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.sizes import Dim, hint
from ..lower.index_expr import Var
from ..lower.ir import F32, Reduce
from ..runtime.cpp_text import loop

STRIP = 32  # additions into one accumulator


def loses(s: Reduce) -> bool:
    """Whether a long reduction must be kept in strips."""
    return s.kind == "sum" and s.expr.dtype is F32


class Strips:
    """The accumulators of a loop nest that are put aside, and the loop whose every `length` turns do it.

    loops: (variable, turns), outermost first; the deepest loop is taken with which a strip is full.
    """

    def __init__(self, loops: Sequence[tuple[Var, Dim]]) -> None:
        self.names: list[str] = []
        self.at: Var | None = None
        self.length = turns = 1
        for v, count in reversed(loops):
            around, turns = turns, turns * max(hint(count), 1)
            if turns > STRIP or type(count) is not int:
                self.at, self.length = v, max(STRIP // around, 1)
                break

    def declare(self, t: str, name: str) -> str:
        """The totals of an accumulator of a type; none where its sums are short."""
        if self.at is None:
            return ""
        self.names.append(name)
        return f"{t} {name}k={{}},{name}l={{}};"

    def loop(self, v: Var, name: str, step: int, end: str, body: str) -> str:
        """The loop of `name`, which is declared, over the steps that end before or at `end`."""
        on = f"{name}++" if step == 1 else f"{name}+={step}"
        inside = f"{name}<" if step == 1 else f"{name}+{step}<="
        if v is not self.at or not self.names:
            return loop(name, end, body, start=None, step=step) + "\n"
        if type(v.size) is int:
            self.at = None  # the loops over what this one leaves are short
        strip = f"{name}+{step * self.length}"
        stop = f"const i64 stop_={strip}<{end}?{strip}:{end}"
        return f"for(;{inside}{end};){{for({stop};{inside}stop_;{on}){{{body}}}{self._keep()}}}\n"

    def end(self) -> str:
        """The accumulators hold their totals from now on."""
        return self._keep() + "".join(f"{n}={n}k;" for n in self.names)

    def _keep(self) -> str:
        return "".join(f"keep({n}k,{n}l,{n});" for n in self.names)
