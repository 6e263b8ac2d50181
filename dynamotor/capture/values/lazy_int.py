"""An integer from outside that changed between calls: as long as the program only counts it on, its value is not guarded.

>>> self.steps += 1        # second compilation: replayed as `self.steps = steps + 1`, whatever steps is
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..guards import ConstEquals, TypeIs
from .base import Value
from .constant import Constant

if TYPE_CHECKING:
    from ..output import Codegen
    from ..trace import Trace

_SIGNS = {operator.add: 1, operator.iadd: 1, operator.sub: -1, operator.isub: -1}


class LazyInt(Constant):
    """`origin + offset`. Reading `value`, as everything but counting on does, installs the guard that it is what it is now."""

    __slots__ = ("trace", "origin", "known", "offset")

    def __init__(self, trace: Trace, origin: Any, known: int, offset: int = 0) -> None:
        self.trace, self.origin, self.known, self.offset = trace, origin, known, offset
        self.source = None if offset else origin
        trace.reader.guard(TypeIs(origin, int))

    @property
    def value(self) -> int:  # type: ignore[override]
        self.trace.reader.guard(ConstEquals(self.origin, self.known))
        return self.known + self.offset

    def python_type(self) -> type:
        return int

    def binary(self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False) -> Value | None:
        sign = _SIGNS.get(op)
        if sign is not None and type(other) is Constant and type(other.value) is int and (sign == 1 or not reflected):
            return LazyInt(trace, self.origin, self.known, self.offset + sign * other.value)
        return super().binary(trace, op, other, reflected)

    def reconstruct(self, cg: Codegen) -> str:
        name = cg.fetched_name(self.origin)
        return f"({name} + {self.offset})" if self.offset else name

    def describe(self) -> str:
        return f"the integer {self.origin}"
