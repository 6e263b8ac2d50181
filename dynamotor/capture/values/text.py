"""`str`, `repr` and `%` of values.

>>> text_of(trace, value, repr)      # a str constant, or a break where the text cannot be known
"""

from __future__ import annotations

import dataclasses
import operator
import re
import types
from typing import Any

from ..breaks import unsupported
from .base import Trace, Value
from .constant import Constant
from .containers import DictValue, ListValue, SequenceValue, SetValue, TupleValue
from .klass import ClassValue
from .user_object import UserObject


def text_of(trace: Trace, value: Value, how: Any) -> Value:
    """`str(value)` or `repr(value)`."""
    if isinstance(value, Constant) and (value.is_plain or isinstance(value, ClassValue)):
        return trace.real_call(how, value.value)
    cls = value.python_type()
    name = "__str__" if how is str else "__repr__"
    raw = trace.type_attr(cls, name)
    if raw is object.__str__:
        raw, name = trace.type_attr(cls, "__repr__"), "__repr__"
    if isinstance(raw, types.FunctionType):
        if raw.__code__.co_filename == dataclasses.__file__ and hasattr(raw, "__wrapped__"):
            return trace.call(trace.make(raw.__wrapped__), [value])  # without the check for recursion by id()
        return trace.call_special(value, name, [], {})
    if isinstance(value, UserObject) and issubclass(cls, BaseException):
        items = value.getattr(trace, "args").unpack(trace)
        if name == "__str__":
            if issubclass(cls, KeyError) and len(items) == 1:
                return text_of(trace, items[0], repr)
            if len(items) < 2:
                return text_of(trace, items[0], str) if items else Constant("")
            return text_of(trace, TupleValue(items), repr)
        return Constant(
            f"{cls.__name__}({', '.join([text_of(trace, i, repr).as_constant() for i in items])})"
        )
    if isinstance(value, UserObject) and isinstance(value.base, Constant):
        return text_of(trace, value.base, how)
    if isinstance(value, SequenceValue | DictValue | SetValue):
        return _container_text(trace, value)
    raise unsupported(
        "unsupported-call",
        f"{how.__name__}() of {value.describe()}",
        cure="build the text outside the compiled function",
    )


def _container_text(trace: Trace, value: Value) -> Value:
    def text(v: Value) -> str:
        return text_of(trace, v, repr).as_constant()

    if type(value) is ListValue:
        return Constant(f"[{', '.join([text(v) for v in value.items])}]")
    if isinstance(value, TupleValue):
        return Constant(
            f"({', '.join([text(v) for v in value.items])}{',' if len(value.items) == 1 else ''})"
        )
    if isinstance(value, SetValue):
        if value.is_constant():
            return Constant(repr(value.as_constant()))
        raise unsupported("unsupported-call", "the text of a set of objects")
    if not isinstance(value, DictValue):
        raise unsupported("unsupported-call", f"the text of {value.describe()}")
    return Constant(f"{{{', '.join([f'{text(k)}: {text(v)}' for k, v in value.load().values()])}}}")


# A directive of `%`: key, flags, width, precision, conversion.
_DIRECTIVE = re.compile(r"%(\(.*?\))?[#0\- +]*(\*|\d+)?(\.\*|\.\d*)?[hlL]?(.)", re.DOTALL)


def format_percent(trace: Trace, left: Constant, right: Value) -> Value:
    """`"..." % values` with values that are not all plain: %s and %r of texts that we can build."""
    if right.is_constant():
        return trace.real_call(operator.mod, left.value, right.as_constant())
    rest = right.unpack(trace) if right.python_type() is tuple else [right]
    given: list[Any] = []

    def settle(found: re.Match[str]) -> str:
        key, width, precision, kind = found.groups()
        if kind == "%" or not rest:
            return found.group()
        value = rest.pop(0)
        known = isinstance(value, Constant) and value.is_plain
        if key or width == "*" or precision == ".*" or not known and kind not in "sr":
            raise unsupported(
                "unsupported-call",
                f"a text is formatted with {found.group()!r} and {value.describe()}",
                cure="build the text outside the compiled function",
            )
        given.append(
            value.as_constant()
            if known
            else text_of(trace, value, str if kind == "s" else repr).as_constant()
        )
        return found.group() if known else found.group()[:-1] + "s"

    pattern = _DIRECTIVE.sub(settle, left.value)
    if not issubclass(right.python_type(), tuple | str) and trace.has_special(right, "__getitem__"):
        rest = []  # a mapping need not be used
    return trace.real_call(operator.mod, pattern, (*given, *[None] * len(rest)))


class Text:
    """This file's part of `Trace`."""

    format_percent = format_percent
