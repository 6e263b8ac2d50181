"""Iterator objects over other iterators: enumerate, zip, map, filter, and the like; all can be rebuilt at a
graph break.
"""

from __future__ import annotations

import itertools
from typing import Any

from ...base.narrowing import checked
from ..breaks import unsupported, unsupported_if
from ..guards import Length
from ..polyfills import cursors
from ..source import SEQUENCE_ITERATORS, Ahead, Called, Missing, SeqItem, Source
from .base import Iterator, ObjectIterator, ResultEmitter, Trace, Value, wrap_typed
from .constant import Constant, is_none
from .containers import TupleValue


class OverIterators(Iterator):
    """Steps other iterators; `given` are the arguments with which the builtin would go on from here. strict: all
    must end together.
    """

    __slots__ = ("given", "strict")

    def __init__(self, *given: Value, strict: bool = False) -> None:
        super().__init__()
        self.given, self.strict = list(given), strict

    def reconstruct(self, emitter: ResultEmitter) -> str:
        counts = emitter.for_frame and self.kind is enumerate  # which a resumed capture cannot ask
        name = emitter.constant(cursors.EnumerateCursor) if counts else self.kind.__name__
        given = [*[emitter.emit(value) for value in self.given], *["strict=True"] * self.strict]
        return f"{name}({', '.join(given)})"

    def _together(self, trace: Trace, inners: list[Any]) -> list[Value]:
        """The next item of each of `inners`; none where one has ended. Raises the program's ValueError if they are
        strict and another has not.
        """
        steps = (inner.next(trace) for inner in inners)
        items = list(itertools.takewhile(lambda item: item is not None, steps))
        odd, how = len(items), "shorter"  # the first that differs from those before it
        if odd == len(inners):
            return items
        if self.strict and odd == 0:
            longer = (i for i, inner in enumerate(inners[1:], 1) if inner.next(trace) is not None)
            odd, how = next(longer, 0), "longer"
        others = "argument 1" if odd == 1 else f"arguments 1-{odd}"
        text = f"{self.kind.__name__}() argument {odd + 1} is {how} than {others}"
        trace.raise_if(self.strict and odd, ValueError, text)
        return []


class EnumerateIterator(OverIterators):
    """`enumerate(inner, count)`."""

    __slots__ = ()
    kind = enumerate

    def next(self, trace: Trace) -> Value | None:
        inner, count = self.given
        item = checked(Iterator, inner).next(trace)
        if item is None:
            return None
        self.given[1] = Constant(count.as_constant() + 1)
        return TupleValue([count, item])


class ZipIterator(OverIterators):
    """`zip(*inners)`."""

    __slots__ = ()
    kind = zip

    def next(self, trace: Trace) -> Value | None:
        items = self._together(trace, self.given)
        return TupleValue(items) if items else None


class MapIterator(OverIterators):
    """`map(fn, *inners)`."""

    __slots__ = ()
    kind = map

    def next(self, trace: Trace) -> Value | None:
        fn, *inners = self.given
        items = self._together(trace, inners)
        # StopIteration of the function ends a `map`, too.
        return trace.unless(StopIteration, trace.call, fn, items) if items else None


class FilterIterator(OverIterators):
    """`filter(fn, inner)`."""

    __slots__ = ()
    kind = filter

    def next(self, trace: Trace) -> Value | None:
        fn, inner = self.given
        while (item := checked(Iterator, inner).next(trace)) is not None:
            found = item if is_none(fn) else trace.unless(StopIteration, trace.call, fn, [item])
            if found is None or trace.truth(found):
                return item if found is not None else None
        return None


def _parts(iterator: Any) -> Any:
    """The iterators of a `zip`, `map` or `filter`; their positions are its whole state."""
    _, parts, *strict = iterator.__reduce__()
    if strict:
        raise TypeError("a strict zip may have begun a step")
    return parts


def _wrap_over(trace: Trace, source: Source | None, obj: Any) -> Value:
    try:
        parts = _parts(obj)
    except TypeError as error:
        raise unsupported("unsupported-value", "an iterator from outside", str(error)) from None
    kind: Any = next(kind for kind in (ZipIterator, MapIterator, FilterIterator) if kind.kind is type(obj))
    asked = Called(source, _parts)
    trace.reader.guard(Length(asked, len(parts)))
    given = [trace.wrap(SeqItem(asked, i), part) for i, part in enumerate(parts)]
    first = 0 if kind is ZipIterator else 1  # behind the function
    inners = [one if isinstance(one, Iterator) else ObjectIterator(one) for one in given[first:]]
    made = kind(*given[:first], *inners)
    made.source = source
    return made


wrap_typed(_wrap_over, zip, map, filter)


# Iterators from outside ------------------------------------------------------------------------------------
def _has(iterator: Any, ahead: Ahead) -> bool:
    try:
        ahead.step(iterator)
    except Missing:
        return False
    return True


def _take(iterator: Any, steps: int) -> None:
    for _ in itertools.islice(iterator, steps):
        pass


class OutsideIterator(Iterator):
    """An iterator over a list, tuple or range with other references. Where it stands is no fact of the program:
    its items are read ahead of it, and it takes its steps behind the graph.
    """

    __slots__ = ("obj", "steps")

    def __init__(self, source: Source | None, obj: Any) -> None:
        super().__init__(source)
        self.obj, self.steps = obj, 0

    def python_type(self) -> type:
        return type(self.obj)

    def next(self, trace: Trace) -> Value | None:
        self._check(trace)
        ahead = Ahead(self.source, self.steps)
        more = trace.reader.ask(
            self.source, self.obj, f"whether there is {ahead}", lambda now: _has(now, ahead)
        )
        trace.effects.touch(self)
        self.steps += 1
        return trace.wrap(ahead, ahead.step(self.obj)) if more else None

    def _check(self, trace: Trace) -> None:
        """Which list it walks is no fact either: each that the program changes may be that one."""
        unsupported_if(
            type(self.obj) is type(iter([]))
            and any(issubclass(value.python_type(), list) for value in trace.effects.touched),
            "unsupported-mutation",
            "a list is changed while an iterator from outside walks one",
        )

    def replay(self, emitter: ResultEmitter) -> None:
        """Take the steps; at the end, one that fails."""
        self._check(emitter.trace)
        emitter.statement(f"{emitter.constant(_take)}({emitter.emit(self)}, {self.steps})")


wrap_typed(lambda trace, source, obj: OutsideIterator(source, obj), *SEQUENCE_ITERATORS)
