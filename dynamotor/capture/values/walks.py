"""Iterators over lists, tuples, dicts and sets, which notice changes meanwhile as CPython's do.

A dict's or set's of the same size, but with other items than at the start, is walked by places in its memory:
that is left to CPython.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any

from ..breaks import unsupported_if
from ..polyfills import cursors
from .base import Iterator, ResultEmitter, Trace, Value
from .constant import Constant

_EXCHANGED = "items are exchanged while a dict or set is iterated over"


class Indexed(Value):
    """A list, tuple or deque, which is walked by index."""

    __slots__ = ()

    @property
    def items(self) -> list[Value]:
        """The item values."""
        raise NotImplementedError


class Table(Value):
    """A dict or set, which is walked by its keys; `removals` counts the items that were taken out."""

    __slots__ = ()
    removals: int

    @property
    def table(self) -> dict[Hashable, Any]:
        """The values by the keys that have been read."""
        raise NotImplementedError

    def load(self) -> dict[Hashable, Any]:
        """All of them, in their order."""
        raise NotImplementedError


class SequenceIterator(Iterator):
    """Steps a list or tuple by index, so that changes during the loop are seen as CPython sees them."""

    __slots__ = ("target", "index")

    def __init__(self, target: Indexed, index: int = 0) -> None:
        super().__init__()
        self.target, self.index = target, index

    def python_type(self) -> type:
        return type(iter(self.target.kind()))

    def next(self, trace: Trace) -> Value | None:
        items = self.target.items
        if self.index >= len(items):
            self.index = 1 << 60
            return None
        self.index += 1
        return items[self.index - 1]

    def reconstruct(self, emitter: ResultEmitter) -> str:
        if emitter.for_frame:
            items = Constant(None) if self.index >= 1 << 60 else self.target
            return f"{emitter.constant(cursors.SequenceCursor)}({emitter.emit(items)}, {self.index})"
        if self.index >= 1 << 60:
            return f"iter({self.target.kind.__name__}())"
        name = emitter.new_object(self, f"iter({emitter.emit(self.target)})")
        if self.index:
            emitter.statement(f"{name}.__setstate__({self.index})")
        return name


class ReversedIterator(SequenceIterator):
    """Steps a list or tuple from its end."""

    __slots__ = ()

    def __init__(self, target: Indexed) -> None:
        super().__init__(target, len(target.items) - 1)

    def python_type(self) -> type:
        return type(reversed(self.target.kind()))

    def next(self, trace: Trace) -> Value | None:
        if not 0 <= self.index < len(self.target.items):
            self.index = -1
            return None
        self.index -= 1
        return self.target.items[self.index + 1]

    def reconstruct(self, emitter: ResultEmitter) -> str:
        if emitter.for_frame:
            return f"{emitter.constant(cursors.ReversedCursor)}({emitter.emit(self.target)}, {self.index})"
        unsupported_if(self.target.kind is deque, "reconstruct", "a reversed iterator over a deque")
        name = emitter.new_object(self, f"reversed({emitter.emit(self.target)})")
        emitter.statement(f"{name}.__setstate__({self.index})")
        return name


class DictIterator(Iterator):
    """Steps the items that a dict had when the loop began; a changed size raises as in CPython, in an
    OrderedDict another order too."""

    __slots__ = ("target", "part", "pairs", "index", "start", "removals")

    def __init__(self, target: Table, part: str, reverse: bool = False) -> None:
        super().__init__()
        self.target, self.part, self.index = target, part, 0
        self.start = reversed if reverse else iter
        self.pairs, self.removals = self._keys(), target.removals

    def _keys(self) -> list[Hashable]:
        return list(self.start(self.target.load()))

    def python_type(self) -> type:
        return type(self.start(getattr(cursors.EMPTY_DICTS.get(self.target.kind, {}), self.part)()))

    @property
    def over(self) -> bool:
        """An OrderedDict's ends with the last item, a dict's when it is asked for more."""
        return self.index > len(self.pairs) - (self.target.kind is OrderedDict)

    def _stale(self) -> str:
        """What CPython says of a dict that has become another since the loop began."""
        if self.target.kind is OrderedDict and (self.target.table or cursors.CLEARED_IS_MUTATED):
            same = self.removals == self.target.removals and len(self.target.table) == len(self.pairs)
            return "" if same else "OrderedDict mutated during iteration"
        name = "OrderedDict" if self.target.kind is OrderedDict else "dictionary"
        if len(self.target.table) != len(self.pairs):
            return f"{name} changed size during iteration"
        unsupported_if(self.removals != self.target.removals, "unsupported-call", _EXCHANGED)
        return ""

    def next(self, trace: Trace) -> Value | None:
        if self.over:
            return None
        if stale := self._stale():
            if self.target.kind is OrderedDict:
                self.index = len(self.pairs) + 1
            raise trace.error(RuntimeError, stale)
        self.index += 1
        if self.index > len(self.pairs):
            return None
        pair = self.target.table[self.pairs[self.index - 1]]
        return trace.make_tuple(list(pair)) if self.part == "items" else pair[0 if self.part == "keys" else 1]

    def reconstruct(self, emitter: ResultEmitter) -> str:
        target, start = self.target, self.start.__name__
        if self.over or self._stale():
            kind = emitter.constant(cursors.EMPTY_DICTS.get(target.kind, {}))
            left = None if self.over else len(target.table)
            return f"{emitter.constant(cursors.stale_dict_iterator)}({kind}, {start}, {self.part!r}, {left})"
        if target.source is not None:
            emitter.replay(target)
        if emitter.for_frame:
            keys = ", ".join([emitter.emit(target.table[key][0]) for key in self.pairs])
            return f"{emitter.constant(cursors.DictCursor)}({emitter.emit(target)}, {start}, {self.part!r}, [{keys}], {self.index})"
        name = emitter.new_object(self, f"{start}({emitter.emit(target)}.{self.part}())")
        if self.index:
            emitter.statement(f"for _ in range({self.index}): next({name}, None)")
        return name


class SetIterator(SequenceIterator):
    """Steps the items that a set had when the loop began; a changed size raises as in CPython, and again."""

    __slots__ = ("of", "keys", "removals", "stale")

    def __init__(self, target: Indexed, of: Table) -> None:
        super().__init__(target)
        self.of, self.keys, self.stale = of, list(of.table), False
        self.removals = of.removals

    def python_type(self) -> type:
        return type(iter(set()))

    @property
    def over(self) -> bool:
        return self.index > len(self.keys)

    def _check(self) -> None:
        self.stale = self.stale or len(self.keys) != len(self.of.table)
        if not self.stale and self.removals != self.of.removals:
            unsupported_if(self.keys != list(self.of.table), "unsupported-call", _EXCHANGED)
            self.removals = self.of.removals

    def next(self, trace: Trace) -> Value | None:
        if not self.over:
            self._check()
            trace.raise_if(self.stale, RuntimeError, "Set changed size during iteration")
        return super().next(trace)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        if self.over:
            return super().reconstruct(emitter) if emitter.for_frame else "iter(set())"
        self._check()
        if emitter.for_frame:
            return f"{emitter.constant(cursors.SetCursor)}({emitter.emit(self.target)}, {self.index}, {emitter.emit(self.of)})"
        unsupported_if(self.stale, "reconstruct", "an iterator over a set that has changed since")
        if self.of.source is not None:
            emitter.replay(self.of)
        name = emitter.new_object(self, f"iter({emitter.emit(self.of)})")
        if self.index:
            emitter.statement(f"for _ in range({self.index}): next({name}, None)")
        return name
