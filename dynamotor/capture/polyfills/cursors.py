"""Iterators that a graph break leaves in a frame: plain Python objects, so that the resumed capture can read
where they stand.

>>> cursor = SequenceCursor([10, 20, 30], 1)
>>> next(cursor), next(cursor)
(20, 30)
"""

from __future__ import annotations

import itertools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

Until = type(iter(int, 0))
Tee: type = type(itertools.tee(())[0])
Group = type(next(itertools.groupby([0]))[1])
_NO_ITEMS: tuple[Any, ...] = ()
_NOTHING: dict[type, tuple[Any, ...]] = {  # arguments that leave no items; () for others
    itertools.islice: ((), 0),
    itertools.repeat: (None, 0),
    itertools.combinations: ((), 1),
    itertools.permutations: ((), 1),
    itertools.compress: ((), ()),
    **dict.fromkeys((itertools.starmap, itertools.takewhile, itertools.dropwhile), (None, ())),
    itertools.filterfalse: (None, ()),
    Group: (itertools.groupby(()), None),
}


def _says_of_cleared() -> str:
    """The error of an iterator of an OrderedDict that is cleared behind its back, which depends on the version."""
    table = OrderedDict(a=1)
    walk = iter(table)
    table.clear()
    try:
        return str(next(walk))
    except RuntimeError as error:
        return str(error)


CLEARED_IS_MUTATED = "mutated" in _says_of_cleared()


def ended(kind: type) -> Iterator[Any]:
    """An iterator of a class of Python's that has no items left."""
    if kind is types.GeneratorType:
        return (item for item in _NO_ITEMS)
    return iter(int, 0) if kind is Until else kind(*_NOTHING.get(kind, ((),)))


EMPTY_DICTS: dict[type, dict[Any, Any]] = {
    OrderedDict: OrderedDict()
}  # by class; others are walked as a dict


def stale_dict_iterator(
    empty: dict[Any, Any], start: Callable[..., Iterator[Any]], part: str, left: int | None
) -> Iterator[Any]:
    """An iterator of a dict's part that is at its end (`left` is None), or that raises because the dict has
    changed since; `left` items are in it now.
    """
    table = empty.copy()
    if left is not None:
        table[0] = 0
    walk = start(getattr(table, part)())
    if left is None:
        next(walk, None)
    elif left:
        table[1] = 1
    else:
        table.clear()
    return walk


class Cursor:
    """Base of the cursors."""

    def __iter__(self) -> Any:
        return self


class SequenceCursor(Cursor):
    """`iter(items)` of a list or tuple, at an index; follows changes of the list as CPython's does."""

    def __init__(self, items: Any, index: int) -> None:
        self.items = items
        self.index = index

    def __next__(self) -> Any:
        index, items = self.index, self.items
        if items is None or index >= len(items):
            self.items = None
            raise StopIteration
        self.index = index + 1
        return items[index]


class ReversedCursor(SequenceCursor):
    """`reversed(items)`, at an index."""

    def __next__(self) -> Any:
        index, items = self.index, self.items
        if items is None or not 0 <= index < len(items):
            self.items = None
            raise StopIteration
        self.index = index - 1
        return items[index]


class SetCursor(SequenceCursor):
    """`iter(table)` of a set that had these items, at an index."""

    def __init__(self, items: Any, index: int, table: Any) -> None:
        super().__init__(items, index)
        self.table = table

    def __next__(self) -> Any:
        if self.items is not None and len(self.items) != len(self.table):
            raise RuntimeError("Set changed size during iteration")
        return super().__next__()


class DictCursor(Cursor):
    """`start(table.part())` that began when the dict had these keys, at an index."""

    def __init__(
        self, table: dict[Any, Any], start: Callable[..., Any], part: str, keys: list[Any], index: int
    ) -> None:
        self.table, self.start, self.part, self.keys, self.index = table, start, part, keys, index

    def __next__(self) -> Any:
        index, keys, table = self.index, self.keys, self.table
        ordered = isinstance(table, OrderedDict)
        if index > len(keys) - ordered:
            raise StopIteration
        if ordered and (table or CLEARED_IS_MUTATED) and list(self.start(table)) != keys:
            self.index = len(keys) + 1
            raise RuntimeError("OrderedDict mutated during iteration")
        if len(table) != len(keys):
            self.index = len(keys) + 1 if ordered else index
            raise RuntimeError(f"{'OrderedDict' if ordered else 'dictionary'} changed size during iteration")
        self.index = index + 1
        if index == len(keys):
            raise StopIteration
        key = keys[index]
        if self.part == "keys":
            return key
        value = dict.__getitem__(table, key)
        return value if self.part == "values" else (key, value)


class EnumerateCursor(Cursor):
    """`enumerate(inner, count)`."""

    def __init__(self, inner: Iterator[Any], count: int) -> None:
        self.inner = inner
        self.count = count

    def __next__(self) -> Any:
        item = next(self.inner)
        count = self.count
        self.count = count + 1
        return count, item
