"""t-strings of Python 3.14: templates and their interpolations, from outside or made in the trace.

>>> t"{x * 2:.2f} m".interpolations[0].value
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ...base.narrowing import checked
from ..opcode_tables import TEMPLATE_CLASSES
from ..source import Attr, Source
from .base import MISSING, Iterator, ResultEmitter, Trace, Value, wrap_typed
from .constant import Constant
from .containers import TupleValue
from .walks import SequenceIterator

Template, Interpolation = TEMPLATE_CLASSES
CONVERSIONS = (None, "s", "r", "a")


class _Parts(Value):
    """An immutable object with named parts, each read at its first use where the object is from outside."""

    __slots__ = ("parts", "obj")
    names: tuple[str, ...]

    def __init__(self, parts: Sequence[Value] = (), source: Source | None = None, obj: Any = MISSING) -> None:
        super().__init__(source)
        self.parts, self.obj = dict(zip(self.names, parts)), obj

    def part(self, trace: Trace, name: str) -> Value:
        """The part of a name."""
        if name not in self.parts:
            self.parts[name] = trace.wrap(Attr(self.source, name), getattr(self.obj, name))
        return self.parts[name]

    def getattr(self, trace: Trace, name: str) -> Value:
        return self.part(trace, name) if name in self.names else super().getattr(trace, name)

    def hash_key(self, trace: Trace) -> Hashable:
        return self if self.obj is MISSING else self.obj


class InterpolationValue(_Parts):
    """A `string.templatelib.Interpolation`."""

    __slots__ = ()
    kind = Interpolation
    names = ("value", "expression", "conversion", "format_spec")

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return f"{emitter.constant(Interpolation)}({', '.join([emitter.emit(self.parts[name]) for name in self.names])})"


class TemplateValue(_Parts):
    """A `string.templatelib.Template`: one string more than interpolations."""

    __slots__ = ()
    kind = Template
    names = ("strings", "interpolations")

    def getattr(self, trace: Trace, name: str) -> Value:
        if name == "values":
            inner = self.part(trace, "interpolations").unpack(trace)
            return TupleValue([each.getattr(trace, "value") for each in inner])
        return super().getattr(trace, name)

    def _texts(self, trace: Trace) -> list[str]:
        return [text.as_constant() for text in self.part(trace, "strings").unpack(trace)]

    def iterate(self, trace: Trace) -> Iterator:
        inner = [*self.part(trace, "interpolations").unpack(trace), None]
        pairs = zip(self._texts(trace), inner, strict=True)
        flat = [part for text, after in pairs for part in (text and Constant(text), after) if part]
        return SequenceIterator(TupleValue(flat))

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if op.__name__ not in ("add", "iadd") or reflected or not isinstance(other, TemplateValue):
            return super().binary(trace, op, other, reflected)
        (*first, left), (right, *last) = self._texts(trace), other._texts(trace)
        inner = [part for t in (self, other) for part in t.part(trace, "interpolations").unpack(trace)]
        strings = [Constant(text) for text in (*first, left + right, *last)]
        return TemplateValue([TupleValue(strings), TupleValue(inner)])

    def reconstruct(self, emitter: ResultEmitter) -> str:
        strings, inner = [
            checked(TupleValue, self.parts[name]).items for name in ("strings", "interpolations")
        ]
        parts = [part for pair in zip(strings, [*inner, None]) for part in pair if part]
        return f"{emitter.constant(Template)}({', '.join([emitter.emit(part) for part in parts])})"


def interpolation(conversion: int, value: Value, expression: Value, spec: Value | None) -> Value:
    """The interpolation that BUILD_INTERPOLATION makes."""
    return InterpolationValue([value, expression, Constant(CONVERSIONS[conversion]), spec or Constant("")])


wrap_typed(lambda trace, source, obj: TemplateValue((), source, obj), Template)
wrap_typed(lambda trace, source, obj: InterpolationValue((), source, obj), Interpolation)
