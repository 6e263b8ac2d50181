"""`id(x)` of an object that may be another one at the next call: a number that is only compared with other ids.

>>> id(x) == id(y), id(x) in seen      # answered by `x is y`, under its guards
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from ..breaks import Unsupported, unsupported
from .base import IdentityKey, ResultEmitter, Trace, Value
from .constant import Constant


class Identity(Value):
    """The id of an object, whose number no program depends on."""

    __slots__ = ("of",)
    kind = int

    def __init__(self, of: Value) -> None:
        super().__init__()
        self.of = of

    def _number(self) -> Unsupported:
        return unsupported(
            "unsupported-call", f"id() of {self.of.describe()}", "the number changes from run to run"
        )

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if isinstance(other, Identity) and op in (operator.eq, operator.ne):
            return Constant(trace.same(self.of, other.of) == (op is operator.eq))
        raise self._number()

    def unary(self, trace: Trace, op: Callable[..., Any]) -> Value:
        raise self._number()

    def truth(self, trace: Trace) -> bool:
        return True

    def getattr(self, trace: Trace, name: str) -> Value:
        raise self._number()

    def hash_key(self, trace: Trace) -> IdentityKey:
        return IdentityKey(trace, self.of)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return f"id({emitter.emit(self.of)})"

    def describe(self) -> str:
        return f"the id of {self.of.describe()}"
