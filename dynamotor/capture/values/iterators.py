"""Iterator objects over other iterators: enumerate, zip, map, filter, and the like; all can be rebuilt at a
graph break.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..polyfills import cursors
from .base import Iterator, Value
from .constant import Constant
from .containers import TupleValue

if TYPE_CHECKING:
    from ..output import Codegen
    from ..trace import Trace


class EnumerateIterator(Iterator):
    """`enumerate(inner, start)`."""

    __slots__ = ("inner", "count")
    kind = enumerate

    def __init__(self, inner: Iterator, start: int) -> None:
        super().__init__()
        self.inner, self.count = inner, start

    def next(self, trace: Trace) -> Value | None:
        item = self.inner.next(trace)
        if item is None:
            return None
        self.count += 1
        return TupleValue([Constant(self.count - 1), item])

    def reconstruct(self, cg: Codegen) -> str:
        if cg.for_frame:
            return f"{cg.constant(cursors.EnumerateCursor)}({cg.emit(self.inner)}, {self.count})"
        return f"enumerate({cg.emit(self.inner)}, {self.count})"


class ZipIterator(Iterator):
    """`zip(*inners, strict=strict)`."""

    __slots__ = ("inners", "strict")
    kind = zip

    def __init__(self, inners: list[Iterator], strict: bool) -> None:
        super().__init__()
        self.inners, self.strict = inners, strict

    def next(self, trace: Trace) -> Value | None:
        items: list[Value] = []
        for i, inner in enumerate(self.inners):
            item = inner.next(trace)
            if item is None:
                if self.strict:
                    self._check(trace, i)
                return None
            items.append(item)
        return TupleValue(items) if self.inners else None

    def _check(self, trace: Trace, ended: int) -> None:
        if ended:
            raise trace.error(ValueError, f"zip() argument {ended + 1} is shorter than argument {ended}")
        for i, inner in enumerate(self.inners[1:]):
            if inner.next(trace) is not None:
                raise trace.error(ValueError, f"zip() argument {i + 2} is longer than argument {i + 1}")

    def reconstruct(self, cg: Codegen) -> str:
        if cg.for_frame and not self.strict:
            return f"{cg.constant(cursors.ZipCursor)}(({''.join([cg.emit(i) + ', ' for i in self.inners])}))"
        return f"zip({', '.join([cg.emit(i) for i in self.inners])}{', strict=True' if self.strict else ''})"


class MapIterator(Iterator):
    """`map(fn, *inners)`."""

    __slots__ = ("fn", "inners")
    kind = map

    def __init__(self, fn: Value, inners: list[Iterator]) -> None:
        super().__init__()
        self.fn, self.inners = fn, inners

    def next(self, trace: Trace) -> Value | None:
        items: list[Value] = []
        for inner in self.inners:
            item = inner.next(trace)
            if item is None:
                return None
            items.append(item)
        return trace.call(self.fn, items)

    def reconstruct(self, cg: Codegen) -> str:
        if cg.for_frame:
            inners = "".join([cg.emit(i) + ", " for i in self.inners])
            return f"{cg.constant(cursors.MapCursor)}({cg.emit(self.fn)}, ({inners}))"
        return f"map({', '.join([cg.emit(self.fn), *[cg.emit(i) for i in self.inners]])})"


class FilterIterator(Iterator):
    """`filter(fn, inner)`."""

    __slots__ = ("fn", "inner")
    kind = filter

    def __init__(self, fn: Value, inner: Iterator) -> None:
        super().__init__()
        self.fn, self.inner = fn, inner

    def next(self, trace: Trace) -> Value | None:
        none = isinstance(self.fn, Constant) and self.fn.value is None
        while (item := self.inner.next(trace)) is not None:
            if trace.truth(item if none else trace.call(self.fn, [item])):
                return item
        return None

    def reconstruct(self, cg: Codegen) -> str:
        if cg.for_frame:
            return f"{cg.constant(cursors.FilterCursor)}({cg.emit(self.fn)}, {cg.emit(self.inner)})"
        return f"filter({cg.emit(self.fn)}, {cg.emit(self.inner)})"
