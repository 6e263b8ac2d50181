"""Slices whose parts a trace knows as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import ResultEmitter, Trace, Value
from .constant import Constant


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

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return f"slice({', '.join([emitter.emit(p) for p in self.parts])})"


def make_slice(parts: Sequence[Value]) -> Value:
    """A slice of two or three parts."""
    start, stop, step = (*parts, Constant(None))[:3]
    if all(type(p) is Constant for p in parts):
        return Constant(slice(*(p.as_constant() for p in parts)))
    return SliceValue(start, stop, step)
