"""Texts of numbers that differ between calls: they are written behind the graph, so that a number that is only shown
needs no guard.

A `LateText` is a `Constant` whose `value` specialises, as a size's does: whoever looks at the text reads the numbers.

>>> late(trace, format, [FloatValue(trace, source, 0.7), Constant(".2f")])       # no guard; None: it cannot wait
"""

from __future__ import annotations

import operator
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from ..guards import ConstEquals
from ..source import Source
from .base import ResultEmitter, Trace, Value
from .constant import Constant
from .containers import TupleValue
from .number import FloatValue
from .size import QuotientValue, SizeValue

_NUMBERS = (SizeValue, FloatValue, QuotientValue)
_SPEC = re.compile(r"(.?[<>=^])?[-+ ]?#?0?\d*[,_]?(\.\d+)?[bdoxXeEfFgGn%]?")
_PERCENT = re.compile(r"%(?:[-+ #0]*\d*(?:\.\d+)?[diuoxXeEfFgGsr]|%)")


class LateText(Constant):
    """A str of parts: texts, and calls (function, its arguments) that give texts."""

    __slots__ = ("parts",)
    kind = str
    is_plain = late = True

    def __init__(self, parts: Sequence[Any]) -> None:
        self.source, self.parts = None, tuple(parts)

    def python_type(self) -> type:
        return str

    @property
    def value(self) -> str:
        return "".join(
            part if isinstance(part, str) else part[0](*[v.as_constant() for v in part[1]])
            for part in self.parts
        )

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if op in (operator.add, operator.iadd) and other.python_type() is str and isinstance(other, Constant):
            return joined([other, self] if reflected else [self, other])
        return super().binary(trace, op, other, reflected)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        words = []
        for part in self.parts:
            if isinstance(part, str):
                words.append(repr(part))
            else:
                fn, args = part
                words.append(f"{emitter.constant(fn)}({', '.join(emitter.emit(arg) for arg in args)})")
        return f"''.join(({', '.join(words)},))"

    def describe(self) -> str:
        return "a text of numbers that differ between calls"


class OutsideText(Constant):
    """A text from outside that differs between calls. Its `value` lets the program be for this text alone."""

    __slots__ = ("trace", "obj")
    kind = str
    is_plain = True

    def __init__(self, trace: Trace, source: Source, obj: str) -> None:
        self.source, self.trace, self.obj = source, trace, obj

    def python_type(self) -> type:
        return str

    @property
    def value(self) -> str:
        self.trace.reader.guard(ConstEquals(self.source, self.obj))
        return self.obj


def outside_text(trace: Trace, source: Source, obj: str) -> LateText:
    """A text that may be passed on and shown without a guard."""
    return LateText([(str, (OutsideText(trace, source, obj),))])


def joined(values: Sequence[Value]) -> Constant:
    """The text of several, one after the other."""
    if not any(isinstance(v, LateText) for v in values):
        return Constant("".join(v.as_constant() for v in values))
    parts: list[Any] = []
    for v in values:
        parts += v.parts if isinstance(v, LateText) else [v.as_constant()]
    return LateText(parts)


def late(trace: Trace, fn: Callable[..., str], args: Sequence[Value]) -> LateText | None:
    """The text that a pure function gives of its arguments, numbers that differ among them; None where it must be
    known now: there is no such number, or another argument is no plain constant, or the function raises.
    """
    others = [arg for arg in args if not isinstance(arg, _NUMBERS)]
    if len(others) == len(args) or not all(type(arg) is Constant and arg.is_plain for arg in others):
        return None
    try:
        fn(*[_like(arg) for arg in args])
    except (TypeError, ValueError, IndexError, KeyError, ArithmeticError):
        return None
    return LateText([(fn, tuple(args))])


def _like(arg: Value) -> Any:
    """A number of the same type, for a trial."""
    return arg.python_type()(1) if isinstance(arg, _NUMBERS) else arg.as_constant()


def late_format(trace: Trace, value: Value, spec: str) -> LateText | None:
    """`format(value, spec)`."""
    if isinstance(value, LateText) and not spec:
        return value
    return late(trace, format, [value, Constant(spec)]) if _SPEC.fullmatch(spec) else None


def late_percent(trace: Trace, left: Constant, right: Value) -> LateText | None:
    """`left % right`."""
    text = left.as_constant()
    if "%" in _PERCENT.sub("", text):
        return None
    if isinstance(right, TupleValue) and right.python_type() is tuple:
        return late(trace, _Percent(text, True), right.items)
    return late(trace, _Percent(text, False), [right])


class _Percent:
    def __init__(self, text: str, many: bool) -> None:
        self.text, self.many = text, many

    def __call__(self, *values: Any) -> str:
        return self.text % (values if self.many else values[0])


def late_str_format(
    trace: Trace, text: str, args: Sequence[Value], kwargs: dict[str, Value]
) -> LateText | None:
    """`text.format(*args, **kwargs)`."""
    for _, name, spec, _ in string.Formatter().parse(text):
        if name is not None and ("." in name or "[" in name or not _SPEC.fullmatch(spec or "")):
            return None
    names, n = tuple(kwargs), len(args)

    def fn(*values: Any) -> str:
        return text.format(*values[:n], **dict(zip(names, values[n:])))

    return late(trace, fn, [*args, *kwargs.values()])
