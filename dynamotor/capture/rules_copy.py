"""`copy.copy` and `copy.deepcopy` of values.

>>> trace.call(trace.make(copy.copy), [value])
"""

from __future__ import annotations

import copy
import functools
import types
from typing import TYPE_CHECKING, Any

from .breaks import unsupported
from .values.base import Value, builtin_rule
from .values.constant import Constant
from .values.containers import DictValue, ListValue, SetValue, TupleValue
from .values.function import FunctionValue
from .values.user_object import UserObject

if TYPE_CHECKING:
    from .trace import Trace

Args = list[Value]
Kwargs = dict[str, Value]
_HOOKS = (
    "__reduce_ex__",
    "__reduce__",
    "__getstate__",
    "__setstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
)


@builtin_rule(copy.copy)
def _copy(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    value = args[0]
    if isinstance(value, Constant | FunctionValue) or value.python_type() is tuple:
        return value
    if isinstance(value, UserObject):
        if trace.has_special(value, "__copy__"):
            return trace.call_special(value, "__copy__", [], {})
        return _copy_object(trace, value, lambda v: v)
    copied = _copy_container(value, lambda v: v)
    if copied is None:
        raise unsupported("unsupported-call", f"copy.copy of {value.describe()}")
    return copied


def _copy_container(value: Any, inner: Any) -> Value | None:
    if type(value) in (ListValue, TupleValue):
        return type(value)([inner(item) for item in value.items])
    if isinstance(value, DictValue):
        return DictValue([(h, inner(k), inner(v)) for h, (k, v) in value.load().items()], kind=value.kind)
    if isinstance(value, SetValue):
        return SetValue(
            {h: inner(v) for h, v in value.table.items()},
            value.kind,
            mirror=None if value.mirror is None else value.mirror.copy(),
        )
    return None


def _copy_object(trace: Trace, value: UserObject, inner: Any, made: Any = None) -> Value:
    """made: called with the copy before it has attributes, which may lead back to it."""
    for name in _HOOKS:
        if (
            isinstance(trace.type_attr(value.cls, name), types.FunctionType)
            or value.slots
            or type(value) is not UserObject
        ):
            raise unsupported(
                "unsupported-call", f"a copy of {value.describe()}", "its class says how to copy it"
            )
    result = UserObject(value.cls, base=None if value.base is None else _copy_container(value.base, inner))
    if made is not None:
        made(result)
    attrs, target = value.dict(trace), result.dict(trace)
    if attrs is not None and target is not None:
        for hash_key, (key, attr) in attrs.load().items():
            target.store(trace, hash_key, key, inner(attr))
    return result


@builtin_rule(copy.deepcopy)
def _deepcopy(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    return _deep(trace, args[0], {})


def _deep(trace: Trace, value: Value, memo: dict[Value, Value]) -> Value:
    if isinstance(value, Constant | FunctionValue):
        return value
    known = memo.get(value)
    if known is not None:
        return known
    if isinstance(value, TupleValue):
        items = [_deep(trace, item, memo) for item in value.items]
        return value if all(a is b for a, b in zip(items, value.items)) else TupleValue(items)
    # A container that holds itself is met again before its copy is known.
    memo[value] = _Cyclic()
    copied: Value | None
    if type(value) is ListValue:
        copied = memo[value] = made = ListValue([])
        made.items.extend([_deep(trace, item, memo) for item in value.items])
    elif isinstance(value, DictValue | SetValue):
        copied = _copy_container(value, lambda v: _deep(trace, v, memo))
    elif isinstance(value, UserObject) and not trace.has_special(value, "__deepcopy__"):
        copied = _copy_object(
            trace, value, lambda v: _deep(trace, v, memo), functools.partial(memo.__setitem__, value)
        )
    elif isinstance(value, UserObject):
        copied = trace.call_special(value, "__deepcopy__", [DictValue([])], {})
    else:
        copied = None
    if copied is None:
        raise unsupported(
            "unsupported-call",
            f"copy.deepcopy of {value.describe()}",
            cure="copy it before the compiled call",
        )
    memo[value] = copied
    return copied


class _Cyclic(Value):
    """Stands for a copy that is still being made; nothing can be done with it."""

    __slots__ = ()

    def python_type(self) -> type:
        raise unsupported("unsupported-call", "copy.deepcopy of a structure that contains itself")

    def reconstruct(self, cg: Any) -> str:
        raise unsupported("reconstruct", "copy.deepcopy of a structure that contains itself")
