"""The Triton function of a "scan" kernel: running results inside a tile, carried from tile to tile of a
longer row.

s = tl.associative_scan(x, 1, plus)          # a row that one tile holds
s = plus(carry, s); carry = last column      # a loop over tiles
"""

from __future__ import annotations

from ..lower.ir import Kernel, ScanStatement, Store, of_kind
from .triton_body import NOTHING, Name, TileScope
from .triton_kernel import TileEmitter
from .triton_ops import COMPUTE, SCAN_BY, mark, reduce_start


class ScanTiles(TileEmitter):
    """The form "scan"."""

    def write(self, top: TileScope) -> None:
        """The lines of the function."""
        plan, kernel = self.plan, self.kernel
        bound, masks = self.body.bind(plan.x, f"pid * {plan.x.block}", top)
        row = self.open(top, bound, masks, 1)
        head = TileScope(row, indent=2) if plan.looped else row
        bound, masks = self.body.bind(plan.r, "base" if plan.looped else "", head)
        inner = self.open(row, bound, masks, head.indent)
        if plan.looped:
            self._start_carries(kernel, row)
        else:
            inner.lines = row.lines
        for s in kernel.phases[0].inner:
            if isinstance(s, ScanStatement):
                self._scan(s, inner)
            else:
                self.body.store(of_kind(s, Store), inner, known=True)
        if plan.looped:
            row.line(f"for base in range(0, {mark(plan.r.size)}, {plan.r.block}):")
            row.lines += [*head.lines, *inner.lines]
        top.lines += row.lines

    def _start_carries(self, kernel: Kernel, row: TileScope) -> None:
        shape = f"[{self.plan.x.block}, 1]"
        row.line(f"last = tl.arange(0, {self.plan.r.block})[None, :] == {self.plan.r.block - 1}")
        for s in kernel.statements():
            if isinstance(s, ScanStatement):
                row.line(
                    f"a{s.id} = tl.full({shape}, {reduce_start(s.kind, s.expr.dtype)}, "
                    f"{COMPUTE[s.expr.dtype]})"
                )
                if s.position is not None and s.kind.startswith("arg"):
                    row.line(f"at{s.id} = tl.full({shape}, 0, {self.position_type})")

    def _scan(self, s: ScanStatement, scope: TileScope) -> None:
        value = self.body.value(s.expr, scope)
        mask, _ = self.body.mask(scope, frozenset("r"))
        tile = self.body.full_tile(value)
        if mask:
            tile = f"tl.where({mask}, {tile}, {reduce_start(s.kind, s.expr.dtype)})"
        tile = self.body.define(tile, NOTHING, scope).text
        result = self._positions(s, tile, scope) if s.kind.startswith("arg") else self._values(s, tile, scope)
        if s.id in self.scans:
            scope.values[self.scans[s.id]] = Name(result, frozenset(("x", "r")))

    def _values(self, s: ScanStatement, tile: str, scope: TileScope) -> str:
        by = SCAN_BY[s.kind]
        found = self.body.define(f"tl.associative_scan({tile}, 1, {by})", NOTHING, scope).text
        if self.plan.looped:
            found = self.body.define(f"{by}(a{s.id}, {found})", NOTHING, scope).text
            self._carry(f"a{s.id}", found, scope)
        return found

    def _positions(self, s: ScanStatement, tile: str, scope: TileScope) -> str:
        assert s.position is not None
        places = self.body.full_tile(self.body.integer(s.position, self.position_type, scope))
        places = self.body.define(places, NOTHING, scope).text
        best, found = self.body.fresh(), self.body.fresh()
        scope.line(f"{best}, {found} = tl.associative_scan(({tile}, {places}), 1, {SCAN_BY[s.kind]})")
        if self.plan.looped:
            scope.line(f"{best}, {found} = {SCAN_BY[s.kind]}(a{s.id}, at{s.id}, {best}, {found})")
            self._carry(f"a{s.id}", best, scope)
            self._carry(f"at{s.id}", found, scope)
        return self.body.define(f"{found}.to(tl.int64)", NOTHING, scope).text

    def _carry(self, name: str, tile: str, scope: TileScope) -> None:
        """The start of the next tile: the last column."""
        scope.line(f"{name} = tl.expand_dims(tl.sum(tl.where(last, {tile}, 0), 1), 1).to({name}.dtype)")
