"""Slices whose parts a trace knows as values, and indices with numbers that differ between calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from .base import ResultEmitter, Trace, Value
from .constant import Constant
from .containers import TupleValue
from .operators import COMPARE

_ELLIPSIS = type(...)
_INDEXES = frozenset((int, slice, type(None), _ELLIPSIS))


class SliceValue(Value):
    """A slice whose parts are not all constants (tensors, ...)."""

    __slots__ = ("parts",)
    kind = slice

    def __init__(self, start: Value, stop: Value, step: Value) -> None:
        super().__init__()
        self.parts = (start, stop, step)

    def is_constant(self) -> bool:
        return all(p.is_constant() for p in self.parts)

    def as_constant(self) -> Any:
        return slice(*(p.as_constant() for p in self.parts))

    def getattr(self, trace: Trace, name: str) -> Value:
        if name in ("start", "stop", "step"):
            return self.parts[("start", "stop", "step").index(name)]
        return super().getattr(trace, name)

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        """Slices compare as CPython compares them: one with itself by identity, two as tuples of their parts."""
        if op not in COMPARE or other.python_type() is not slice:
            return super().binary(trace, op, other, reflected)
        if trace.same(self, other):
            return trace.make(op in (operator.le, operator.eq, operator.ge))
        parts = [other.getattr(trace, name) for name in ("start", "stop", "step")]
        sides: list[Value] = [TupleValue(self.parts), TupleValue(parts)]
        return trace.binary(op, *(sides[::-1] if reflected else sides))

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return f"slice({', '.join([emitter.emit(p) for p in self.parts])})"


def make_slice(parts: Sequence[Value]) -> Value:
    """A slice of two or three parts."""
    start, stop, step = (*parts, Constant(None))[:3]
    if all(type(p) is Constant for p in parts):
        return Constant(slice(*(p.as_constant() for p in parts)))
    return SliceValue(start, stop, step)


def without_symbols(ndim: int, key: Value) -> tuple[Value | None, list[tuple[int, Value]]]:
    """An index with whole dimensions where it has numbers that differ between calls (None: that is all that it
    has), which PyTorch's indexing takes for plain ones, and the result's dimensions from which to select these."""
    parts = key.items if type(key) is TupleValue else [key]
    kinds = [part.python_type() for part in parts]
    symbols = [kind is int and part.symbolic for kind, part in zip(kinds, parts, strict=True)]
    if not any(symbols) or not _INDEXES.issuperset(kinds):
        return key, []
    taken = sum(kind in (int, slice) for kind in kinds)
    places: list[tuple[int, Value]] = []
    dim = 0
    for part, kind, symbol in zip(parts, kinds, symbols, strict=True):
        if symbol:
            places.append((dim, part))
        dim += ndim - taken if kind is _ELLIPSIS else symbol or kind is not int
    plain = [Constant(slice(None)) if symbol else part for part, symbol in zip(parts, symbols, strict=True)]
    return None if all(symbols) else TupleValue(plain), places
