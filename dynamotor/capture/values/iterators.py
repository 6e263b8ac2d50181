"""Iterator objects over other iterators: enumerate, zip, map, filter, and the like; all can be rebuilt at a
graph break.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ..polyfills import cursors
from .base import Iterator, Value
from .constant import Constant, is_none
from .containers import TupleValue

if TYPE_CHECKING:
    from ..output import Codegen
    from ..trace import Trace


class OverIterators(Iterator):
    """Steps other iterators; `given` are the arguments with which the builtin would go on from here."""

    __slots__ = ("given",)

    def __init__(self, *given: Value) -> None:
        super().__init__()
        self.given = list(given)

    def reconstruct(self, cg: Codegen) -> str:
        name = cg.constant(cursors.CURSORS[self.kind]) if cg.for_frame else self.kind.__name__
        return f"{name}({', '.join([cg.emit(value) for value in self.given])})"


class EnumerateIterator(OverIterators):
    """`enumerate(inner, count)`."""

    __slots__ = ()
    kind = enumerate

    def next(self, trace: Trace) -> Value | None:
        inner, count = self.given
        item = inner.next(trace)  # type: ignore[attr-defined]
        if item is None:
            return None
        self.given[1] = Constant(count.as_constant() + 1)
        return TupleValue([count, item])


class ZipIterator(OverIterators):
    """`zip(*inners)`."""

    __slots__ = ()
    kind = zip

    def next(self, trace: Trace) -> Value | None:
        items = _step(trace, self.given)
        return TupleValue(items) if len(items) == len(self.given) > 0 else None


class StrictZipIterator(ZipIterator):
    """`zip(*inners, strict=True)`."""

    __slots__ = ()

    def next(self, trace: Trace) -> Value | None:
        items = _step(trace, self.given)
        ended = len(items)
        if ended == len(self.given):
            return TupleValue(items) if items else None
        if ended:
            raise trace.error(ValueError, f"zip() argument {ended + 1} is shorter than argument {ended}")
        for i, inner in enumerate(self.given[1:]):
            if inner.next(trace) is not None:  # type: ignore[attr-defined]
                raise trace.error(ValueError, f"zip() argument {i + 2} is longer than argument {i + 1}")
        return None

    def reconstruct(self, cg: Codegen) -> str:
        return f"zip({', '.join([cg.emit(value) for value in self.given])}, strict=True)"


class MapIterator(OverIterators):
    """`map(fn, *inners)`."""

    __slots__ = ()
    kind = map

    def next(self, trace: Trace) -> Value | None:
        fn, *inners = self.given
        items = _step(trace, inners)
        return trace.call(fn, items) if len(items) == len(inners) else None


class FilterIterator(OverIterators):
    """`filter(fn, inner)`."""

    __slots__ = ()
    kind = filter

    def next(self, trace: Trace) -> Value | None:
        fn, inner = self.given
        while (item := inner.next(trace)) is not None:  # type: ignore[attr-defined]
            if trace.truth(item if is_none(fn) else trace.call(fn, [item])):
                return item
        return None


def _step(trace: Trace, inners: list[Any]) -> list[Value]:
    """The next item of each, up to the first that has none."""
    return list(itertools.takewhile(lambda item: item is not None, (inner.next(trace) for inner in inners)))
