"""`str`, `repr` and `%` of values.

>>> text_of(trace, value, repr)      # a str constant, or a break where the text cannot be known
"""

from __future__ import annotations

import dataclasses
import operator
import reprlib
import types
from collections.abc import Callable
from typing import Any

from ..breaks import OfTrace, unsupported
from .base import StandIn, Trace, Value
from .constant import Constant
from .containers import DictValue, ListValue, SequenceValue, SetValue, TupleValue
from .klass import ClassValue
from .lazy_text import LateText, late
from .user_object import UserObject

# The wrapper of a dataclass's __repr__ is from the first until 3.12, then from the second.
_GUARDED_BY_ID = (dataclasses.__file__, reprlib.__file__)


def text_of(trace: Trace, value: Value, how: Any) -> Value:
    """`str(value)` or `repr(value)`."""
    if isinstance(value, LateText) and how is str:
        return value
    waiting = late(trace, how, [value])
    if waiting is not None:
        return waiting
    if isinstance(value, Constant) and value.is_plain:
        return trace.real_call(how, value.value)
    cls = value.python_type()
    name = "__str__" if how is str else "__repr__"
    raw = trace.type_attr(cls, name)
    if raw is object.__str__:
        raw, name = trace.type_attr(cls, "__repr__"), "__repr__"
    if isinstance(raw, types.FunctionType):
        if raw.__code__.co_filename in _GUARDED_BY_ID and hasattr(raw, "__wrapped__"):
            return trace.call(trace.make(raw.__wrapped__), [value])  # without the check for recursion by id()
        return trace.call_special(value, name, [], {})
    if isinstance(value, ClassValue):
        return trace.real_call(how, value.value)
    if isinstance(value, UserObject) and issubclass(cls, BaseException):
        items = value.getattr(trace, "args").unpack(trace)
        builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
        like = type(cls.__name__, (builtin,), {})
        return formatted(trace, lambda: how(like(*[shown(trace, item) for item in items])))
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
    if type(value) is ListValue or isinstance(value, TupleValue):
        return Constant(repr(value.kind([StandIn(trace, item) for item in value.items])))
    if isinstance(value, SetValue) and value.is_constant():
        return Constant(repr(value.as_constant()))
    if not isinstance(value, DictValue):
        raise unsupported("unsupported-call", f"the text of {value.describe()} of objects")
    return Constant(repr({StandIn(trace, k): StandIn(trace, v) for k, v in value.load().values()}))


class _Parts(StandIn):
    """One of an object with items, which a text may name."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        return shown(self.trace, self.value.getitem(self.trace, self.trace.make(key)))


_CONVERSIONS = "__int__", "__index__", "__float__"


def _with_content(trace: Trace, value: Value, content: str | int | float) -> Any:
    """An instance of a subclass of str, int or float: C code reads its content, and asks the trace for its texts."""
    members = {name: vars(StandIn)[name] for name in ("__str__", "__repr__", "__format__")}
    cls: Any = type(value.python_type().__name__, (type(content),), members)
    made = cls(content)
    made.trace, made.value = trace, value
    return made


def shown(trace: Trace, value: Value) -> Any:
    """What C code is given that writes a text of a value."""
    if isinstance(value, Constant) and value.is_plain:
        return value.as_constant()
    base, cls = getattr(value, "base", None), value.python_type()
    converts = any(isinstance(trace.type_attr(cls, name), types.FunctionType) for name in _CONVERSIONS)
    if isinstance(base, Constant) and type(base.value) in (str, int, float) and not converts:
        return _with_content(trace, value, base.value)
    return (_Parts if trace.has_special(value, "__getitem__") else StandIn)(trace, value)


def formatted(trace: Trace, how: Callable[..., str], *args: Any, **kwargs: Any) -> Value:
    """The text that C code writes of the `shown` value. Other questions break the graph."""
    try:
        return Constant(how(*args, **kwargs))
    except OfTrace:
        raise
    except Exception as error:
        cure = "build the text outside the compiled function"
        raise unsupported("unsupported-call", "a text of objects is formatted", str(error), cure) from None


def format_percent(trace: Trace, left: Constant, right: Value) -> Value:
    """`"..." % values` with values that are not all plain."""
    if right.is_constant():
        return trace.real_call(operator.mod, left.value, right.as_constant())
    many = issubclass(right.python_type(), tuple)
    values = tuple([shown(trace, v) for v in right.unpack(trace)]) if many else shown(trace, right)
    return formatted(trace, operator.mod, left.value, values)
