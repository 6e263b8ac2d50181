"""`collections.deque`, from outside or made in the trace. One from outside is read through the list of its
items, taken at each call.

>>> recent.append(x.mean())         # recent = deque(maxlen=8): written back after the graph
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ...base.registry import MaybeNone
from ..breaks import unsupported, unsupported_if
from ..guards import Length
from ..source import Called, SeqItem, Source
from .base import MISSING, Iterator, ResultEmitter, Trace, Value, builtin_rule, makers, wrap_typed
from .constant import Constant
from .containers import ListValue, contents_of
from .walks import SequenceIterator


class DequeValue(ListValue):
    """A deque of exactly that class, whose items are in a deque too: it has the same bound and the same errors."""

    __slots__ = ("maxlen", "changes")
    kind = deque  # type: ignore[assignment]

    def __init__(
        self,
        items: Iterable[Value] | None,
        source: Source | None = None,
        obj: Any = MISSING,
        trace: Trace | MaybeNone = None,
        maxlen: int | None = None,
    ) -> None:
        super().__init__(None, source, obj, trace)
        self._items: Any = None if items is None else deque(items, maxlen)
        self.maxlen, self.changes = maxlen, 0

    @property
    def items(self) -> Any:
        if self._items is None:
            listed = Called(self.source, list)
            items = (self.trace.wrap(SeqItem(listed, i), item) for i, item in enumerate(list(self.obj)))
            self._items = deque(items, self.maxlen)
        return self._items

    def index_of(self, trace: Trace, key: Value) -> Any:
        index = super().index_of(trace, key)
        trace.raise_if(isinstance(index, slice), TypeError, "sequence index must be integer, not 'slice'")
        return index

    def getattr(self, trace: Trace, name: str) -> Value:
        return Constant(self.maxlen) if name == "maxlen" else super().getattr(trace, name)

    def as_constant(self) -> Any:
        return deque([item.as_constant() for item in self.items], self.maxlen)

    def mutate(self, trace: Trace) -> Any:
        self.changes += 1
        return super().mutate(trace)

    def extend(self, trace: Trace, other: Value, left: bool = False) -> None:
        for item in list(self.items) if contents_of(other) is self else other.each(trace):
            items = self.mutate(trace)
            (items.appendleft if left else items.append)(item)

    def iterate(self, trace: Trace) -> Iterator:
        return DequeIterator(self)

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        unsupported_if(
            op.__name__ in ("add", "mul", "iadd", "imul"), "unsupported-call", f"{op.__name__} of a deque"
        )
        return super().binary(trace, op, other, reflected)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        name = emitter.new_object(self, f"{emitter.constant(deque)}(maxlen={self.maxlen})")
        self.replay(emitter, name)
        return name

    def replay(self, emitter: ResultEmitter, name: str = "") -> None:
        """Give it its final contents."""
        name = name or emitter.emit(self)
        items = ", ".join([emitter.emit(item) for item in self.items])
        if self.obj is not MISSING:
            emitter.statement(f"{name}.clear()")
        emitter.statement(f"{name}.extend([{items}])")


class DequeIterator(SequenceIterator):
    """Stops where the deque was changed meanwhile: its own raises there."""

    __slots__ = ("deque", "changes")

    def __init__(self, target: DequeValue) -> None:
        super().__init__(target)
        self.deque, self.changes = target, target.changes

    def next(self, trace: Trace) -> Value | None:
        unsupported_if(
            self.changes != self.deque.changes, "unsupported-call", "a deque is changed while it is walked"
        )
        return super().next(trace)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        raise unsupported("reconstruct", "an iterator over a deque")


def _wrap(trace: Trace, source: Source, obj: deque[Any]) -> Value:
    trace.reader.guard(Length(Called(source, list), len(obj)))
    maxlen = trace.reader.ask(source, obj, "its maxlen", lambda now: now.maxlen)
    return DequeValue(None, source, obj, trace, maxlen)


wrap_typed(_wrap, deque)


@builtin_rule(deque)
def _make(trace: Trace, iterable: Value | None = None, maxlen: Value | None = None) -> Value:
    most = None if maxlen is None else maxlen.as_constant()
    if not (most is None or type(most) is int and most >= 0):
        raise unsupported("unsupported-call", f"a deque is made with maxlen={most!r}")
    made = DequeValue([], maxlen=most)
    if iterable is not None:
        made.extend(trace, iterable)
    return made


makers[deque] = lambda trace, obj: DequeValue([trace.fresh(item) for item in obj], maxlen=obj.maxlen)
