"""`threading.local`: the program's writes are seen by its later reads, and written for real after the
graph.
"""

from __future__ import annotations

import threading
from typing import Any

from .breaks import unsupported
from .source import Source
from .values.base import MISSING, ResultEmitter, Trace, Value, builtin_rule, wrap_typed
from .values.user_object import UserObject


class LocalValue(UserObject):
    """A `threading.local`, from outside or made in the trace. `written` holds the program's writes (None:
    deleted).
    """

    __slots__ = ("written",)

    def __init__(self, cls: type, source: Source | None = None, obj: Any = MISSING) -> None:
        super().__init__(cls, source, obj)
        self.written: dict[str, Value | None] = {}

    def getattr(self, trace: Trace, name: str) -> Value:
        if name in self.written or self.obj is MISSING:
            found = self.written.get(name)
        elif trace.type_attr(self.cls, name) is MISSING:  # it can only be an entry of this thread's dict
            found = trace.reader.attribute(self.source, self.obj, name)
        else:
            return self._of_class(trace, name)
        if found is not None:
            return found
        return trace.getattr_hook(self, self.cls, name, lambda: trace.no_attr(self, name))

    def _of_class(self, trace: Trace, name: str) -> Value:
        if self.written:
            raise unsupported(
                "unsupported-value", f"attribute {name!r} of {self.describe()} that was written before"
            )
        return trace.foreign_getattr(self, self.cls, name)

    def setattr(self, trace: Trace, name: str, value: Value) -> None:
        self._write(trace, name, value)

    def delattr(self, trace: Trace, name: str) -> None:
        self.getattr(trace, name)
        self._write(trace, name, None)

    def _write(self, trace: Trace, name: str, value: Value | None) -> None:
        if (
            trace.type_attr(self.cls, name) is not MISSING
            or trace.type_attr(self.cls, "__setattr__") is not _SETATTR
        ):
            raise unsupported("unsupported-mutation", f"attribute {name!r} of {self.describe()} is set")
        self.written[name] = value
        if self.obj is not MISSING:
            trace.effects.touch(self)

    def replay(self, emitter: ResultEmitter) -> None:
        """Set and delete as the program did."""
        name = emitter.emit(self)
        for key, value in self.written.items():
            if value is not None:
                emitter.statement(f"setattr({name}, {key!r}, {emitter.emit(value)})")
            else:
                emitter.statement(f"{name}.__dict__.pop({key!r}, None)")

    def reconstruct(self, emitter: ResultEmitter) -> str:
        name = emitter.new_object(self, f"{emitter.constant(self.cls)}()")
        self.replay(emitter)
        return name


_SETATTR = vars(threading.local)["__setattr__"]


wrap_typed(lambda trace, source, obj: LocalValue(type(obj), source, obj), threading.local)


@builtin_rule(threading.local)
def _make_local(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    trace.raise_if(args or kwargs, TypeError, "Initialization arguments are not supported")
    return LocalValue(threading.local)
