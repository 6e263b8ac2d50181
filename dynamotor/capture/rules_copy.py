"""`copy.copy` and `copy.deepcopy` of values.

>>> trace.call(trace.make(copy.copy), [value])
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch

from .breaks import unsupported
from .values.base import MISSING, Trace, Value, builtin_rule
from .values.constant import Constant
from .values.containers import DictValue, ListValue, SetValue, TupleValue
from .values.function import FunctionValue
from .values.nn_module import NNModuleValue
from .values.tensor import TensorValue, torch_call
from .values.user_object import UserObject

_HOOKS = (
    "__reduce_ex__",
    "__reduce__",
    "__getnewargs__",
    "__getnewargs_ex__",
)
# What copies of containers call besides.
_READ_AND_FILLED = {
    ListValue: ("__iter__", "append", "extend"),
    DictValue: ("items", "__setitem__"),
    SetValue: ("__iter__",),
}


def _defines(trace: Trace, value: UserObject, name: str) -> bool:
    """Whether the class has such a method; `copy` takes one set to None for none."""
    raw = trace.type_attr(value.cls, name)
    return raw is not MISSING and raw is not None


@builtin_rule(copy.copy)
def _copy(trace: Trace, value: Value) -> Value:
    if isinstance(value, Constant | FunctionValue) or value.python_type() in (tuple, frozenset):
        return value
    if isinstance(value, UserObject):
        if _defines(trace, value, "__copy__"):
            return trace.call_special(value, "__copy__", [], {})
        return _copy_object(trace, value, lambda v: v)
    copied = _copy_container(value, lambda v: v)
    if copied is None:
        raise unsupported("unsupported-call", f"copy.copy of {value.describe()}")
    return copied


def _copy_container(value: Any, inner: Any) -> Value | None:
    if type(value) in (ListValue, TupleValue):
        return type(value)([inner(item) for item in value.items])
    if isinstance(value, DictValue) and value.kind is not types.MappingProxyType:
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
    for name in (*_HOOKS, *_READ_AND_FILLED.get(type(value.base), ())):
        if (
            isinstance(trace.type_attr(value.cls, name), types.FunctionType)
            or value.slots
            or type(value) not in (UserObject, NNModuleValue)
        ):
            raise unsupported(
                "unsupported-call", f"a copy of {value.describe()}", "its class says how to copy it"
            )
    if any(isinstance(m, types.MemberDescriptorType) for c in value.cls.__mro__ for m in vars(c).values()):
        raise unsupported("unsupported-call", f"a copy of {value.describe()}", "its class has slots")
    base = value.base if isinstance(value.base, Constant) else _copy_container(value.base, inner)
    in_python = value.cls.__flags__ & 1 << 9  # a heap type: only C makes the others
    plain = in_python and trace.type_attr(value.cls, "__new__") is object.__new__
    if not (plain if value.base is None else base is not None):
        raise unsupported("unsupported-call", f"a copy of {value.describe()}", "its `__new__` is called")
    result = type(value)(value.cls, base=base)
    if made is not None:
        made(result)
    gives, takes = [
        isinstance(trace.type_attr(value.cls, name), types.FunctionType)
        for name in ("__getstate__", "__setstate__")
    ]
    attrs = trace.call_special(value, "__getstate__", [], {}) if gives else value.dict(trace)
    target = result.dict(trace)
    if attrs is None or target is None:
        return result
    if not isinstance(attrs, DictValue):
        raise unsupported("unsupported-call", f"a copy of {value.describe()}", "its state is no dict")
    if takes and made is None:  # a shallow copy is given the very state
        trace.call_special(result, "__setstate__", [attrs], {})
        return result
    state = DictValue([]) if takes else target
    for hash_key, (key, attr) in attrs.load().items():
        state.store(trace, hash_key, key, inner(attr))
    if takes:
        trace.call_special(result, "__setstate__", [state], {})
    return result


builtin_rule(copy.deepcopy)(lambda trace, x: _deep(trace, x, {}))


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
    elif isinstance(value, UserObject) and not _defines(trace, value, "__deepcopy__"):
        copied = _copy_object(
            trace, value, lambda v: _deep(trace, v, memo), functools.partial(memo.__setitem__, value)
        )
    elif isinstance(value, UserObject):
        copied = trace.call_special(value, "__deepcopy__", [DictValue([])], {})
    elif type(value) is TensorValue:
        copied = _deep_tensor(trace, value, memo)
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


def _deep_tensor(trace: Trace, value: TensorValue, memo: dict[Value, Value]) -> Value | None:
    """A copy of a parameter, or of a leaf without a gradient that is the whole of its memory as far as anybody
    sees, and of which nothing else in the structure is a view.
    """
    example = value.example
    alone = not any(type(v) is TensorValue and v is not value and v.memory is example.memory for v in memo)
    whole = example.spec.is_contiguous and not example.spec.is_symbolic
    parameter = value.cls is torch.nn.Parameter
    if not (alone and whole) or not parameter and (value.cls is not torch.Tensor or example.requires_grad):
        return None
    offset = trace.call(trace.make(torch.Tensor.storage_offset), [value])
    if offset.as_constant() or value.attributes and not parameter:
        return None
    if value.obj is not MISSING and not parameter:
        if trace.reader.ask(value.source, value.obj, "its attributes", _has_attributes):
            return None
    copied = torch_call(trace, "clone", [torch_call(trace, "detach", [value], {})], {})
    wanted = Constant(example.requires_grad)
    return trace.call(trace.make(torch.nn.Parameter), [copied, wanted]) if parameter else copied


def _has_attributes(tensor: torch.Tensor) -> bool:
    return bool(tensor.__dict__) or tensor.grad is not None


class _Cyclic(Value):
    """Stands for a copy that is still being made; nothing can be done with it."""

    __slots__ = ()

    def python_type(self) -> type:
        raise unsupported("unsupported-call", "copy.deepcopy of a structure that contains itself")

    def reconstruct(self, emitter: Any) -> str:
        raise unsupported("reconstruct", "copy.deepcopy of a structure that contains itself")
