"""The C++ function of a map that reads a buffer across its rows: in square tiles, transposed in registers.

for (64 rows) { for (16 elements of each) { 16 vectors along the rows; transposed; 16 rows of the map } }

Element by element such a map takes one cache line an element.
"""

from __future__ import annotations

from ..graph.spec import numel
from ..lower.index_expr import Var
from ..lower.ir import Expr, Store, of_kind
from ..runtime.cpp_text import loop
from .cpp_body import CppScope
from .cpp_kernel import ROW, RowsEmitter
from .cpp_ops import ctype

TILES = 4  # of the rows that a task takes, so that it touches more than one line of a page


class TilesEmitter(RowsEmitter):
    """The "rows" template; maps with transposed operands in tiles."""

    def _plain(self) -> str:
        for v in reversed(self.kernel.outer):
            across = self._across_rows(v)
            if across:
                return self._in_tiles(v, across)
        return super()._plain()

    def goes_in_tiles(self) -> bool:
        """Whether there is a loop to go across."""
        return any(self._across_rows(v) for v in self.kernel.outer)

    def _across_rows(self, v: Var) -> list[Expr]:
        """The loads that follow each other along the outer loop v and not along the row, where tiles suit."""
        k = self.kernel
        if not self.is_map or len(k.inner) != 1 or self.width == 1 or self.scatters:
            return []
        if type(self.size) is not int or type(v.size) is not int or v.size < self.width:
            return []
        if any(
            e.op in ("masked", "rand") for e in self.exprs
        ):  # a load may be one that its condition forbids
            return []
        loads = [e for e in self.exprs if e.op == "load" and e.args[1].is_affine]
        found = [
            e
            for e in loads
            if e.args[1].coefficient(v) in (1, 2) and e.args[1].coefficient(k.inner[0]) not in (0, 1)
        ]
        return found if len(found) <= 4 else []

    def _in_tiles(self, v: Var, across: list[Expr]) -> str:
        k, width, (lane,) = self.kernel, self.width, self.kernel.inner
        others = [o for o in k.outer if o is not v]
        row, first, column = self.vars[v], f"{self.vars[v]}_0", self.vars[lane]
        place = CppScope(self.top, [*((o, self.vars[o]) for o in others), (ROW, "")])
        fetched, taken, values = "", "", {}
        for n, e in enumerate(across):
            along = CppScope(place, [(v, first), (lane, f"({column}+j_)")], width, v)
            t = ctype(e.dtype, width)
            text = self.body.load(e, along, width, t)
            fetched += (
                f"{t} t{n}_[{width}];for(int j_=0;j_<{width};j_++){{t{n}_[j_]={text};}}transpose_(t{n}_);"
            )
            taken += f"const {t} x{n}_=t{n}_[{row}-{first}];"
            values[e] = f"x{n}_", width
        tile = fetched + self._rows(place, row, first, f"{first}+{width}", width, values, taken)
        tiles = f"i64 {first}=lo;{loop(first, 'hi', tile, start=None, step=width)}"
        rest = self._rows(place, row, first, "hi", width, {})
        inside = (
            f"i64 {column}=0;{loop(column, str(self.size), f'{{{tiles}{rest}}}', start=None, step=width)}"
        )
        if self.size % width:
            inside += loop(column, str(self.size), self._rows(place, row, "lo", "hi", 1, {}), start=None)
        span = TILES * width
        blocks = -(-v.size // span)
        head = self.decode(f"(task/{blocks})", others, self.vars) if others else ""
        head += f"const i64 lo=task%{blocks}*{span},hi=lo+{span}<{v.size}?lo+{span}:{v.size};"
        tasks = numel(o.size for o in others) * blocks
        return self.over("task", tasks, self.number(tasks), f"{head}{''.join(place.lines)}{{{inside}}}")

    def _rows(
        self,
        place: CppScope,
        row: str,
        start: str,
        end: str,
        width: int,
        values: dict[Expr, tuple[str, int]],
        before: str = "",
    ) -> str:
        """One vector, or one element, of each of some rows. values: loads that the text before has taken."""
        (lane,) = self.kernel.inner
        v = next(o for o in self.kernel.outer if self.vars[o] == row)
        scope = CppScope(place, [(v, row), (lane, self.vars[lane])], width, lane if width > 1 else None)
        scope.values.update(values)
        for s in self.kernel.phases[0].inner:
            self.store(of_kind(s, Store), scope)
        return loop(row, end, [before, *scope.lines], start=start)
