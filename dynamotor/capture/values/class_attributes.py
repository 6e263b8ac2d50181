"""Attributes that a program sets on its own classes: they are seen by the rest of the trace and set after the graph.

>>> Counted.calls += 1      # a write after the graph; `self.calls` of an instance sees it at once

Only plain data takes this way: a descriptor, a function, a special method or a class with an unusual metaclass
breaks the graph, since the trace may have used the replaced attribute.
"""

from __future__ import annotations

from ..breaks import unsupported_if
from ..source import Const
from .base import MISSING, ResultEmitter, Trace, Value


class PendingAttribute:
    """Stands in for the raw attribute of a class (`trace.type_attr`) until the write is done."""

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value


class ClassWrites(Value):
    """The attributes of one class that the trace has set, an effect of the trace."""

    __slots__ = ("cls", "names")

    def __init__(self, cls: type) -> None:
        self.source, self.cls = Const(cls, cls.__qualname__), cls
        self.names: dict[str, PendingAttribute] = {}

    def python_type(self) -> type:
        return type(self)

    def replay(self, emitter: ResultEmitter) -> None:
        for name, pending in self.names.items():
            emitter.statement(f"{emitter.constant(self.cls)}.{name} = {emitter.emit(pending.value)}")


def set_class_attribute(trace: Trace, cls: type, name: str, value: Value) -> None:
    """`cls.name = value`."""
    refused = f"attribute {name!r} of class {cls.__name__} is set"
    unsupported_if(
        trace.type_attr(type(cls), "__setattr__") is not type.__setattr__
        or trace.type_attr(type(cls), name) is not MISSING
        or name.startswith("__"),
        "unsupported-mutation",
        refused,
        "its metaclass takes part, or the name is special",
    )
    unsupported_if(
        hasattr(value.python_type(), "__get__") or not name.isidentifier(),
        "unsupported-mutation",
        refused,
        "the value is a descriptor",
    )
    writes = trace.class_writes.get(cls)
    if writes is None or name not in writes.names:
        was_data = trace.reader.ask(
            Const(cls, cls.__qualname__),
            cls,
            f"whether {name!r} is data that nothing finalises",
            lambda now: _is_data(now, name),
        )
        unsupported_if(not was_data, "unsupported-mutation", refused, "it replaces a descriptor or an object")
    if writes is None:
        writes = trace.class_writes[cls] = ClassWrites(cls)
    writes.names[name] = PendingAttribute(value)
    trace.forget_type_attr(name)
    trace.effects.touch(writes)


def _is_data(cls: type, name: str) -> bool:
    """Whether setting the attribute replaces nothing but data."""
    found = [vars(k)[name] for k in cls.__mro__ if name in vars(k)]
    return not any(hasattr(type(v), "__get__") or hasattr(type(v), "__del__") for v in found)


def pending_attribute(trace: Trace, cls: type, name: str) -> PendingAttribute | None:
    """The attribute that a lookup along the method resolution order finds, where the trace has set it."""
    for each in cls.__mro__:
        writes = trace.class_writes.get(each)
        if writes is not None and name in writes.names:
            return writes.names[name]
        if name in vars(each):
            return None
    return None
