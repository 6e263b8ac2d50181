"""Instances: objects of any class from outside, and objects made in the trace (virtual until they escape).

Attributes live in a `DictValue` over the instance's `__dict__`, so reads are guarded and writes recorded in
one place. An instance of a subclass of list, dict, tuple, set, int, str ... keeps that content in `base`.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from ...base.narrowing import checked
from ..breaks import unsupported, unsupported_if
from ..guards import Absent, Length, TypeIs
from ..source import Attr, InstanceDict, Source
from .base import MISSING, Epoch, ObjectKey, ResultEmitter, Trace, Value, wrap_rule
from .constant import Constant
from .containers import DictValue, ListValue, SetValue, TupleValue, owner_of
from .operators import c_name

_SET_ARGS = vars(BaseException)["args"].__set__


class UserObject(Value):
    """An instance of any class. `obj` is the outside object or MISSING; `slots` holds C members and the like
    by name.
    """

    __slots__ = ("cls", "obj", "base", "slots", "changed_slots", "_dict", "born")

    def __init__(
        self, cls: type, source: Source | None = None, obj: Any = MISSING, base: Value | None = None
    ) -> None:
        self.source, self.cls, self.obj, self.base = source, cls, obj, base
        self.slots: dict[str, Value | None] = {}
        self.changed_slots: dict[str, Any] = {}
        self._dict: DictValue | None = None
        self.born = Epoch.now
        if (
            obj is MISSING
            and isinstance(base, ListValue | DictValue | SetValue)
            and issubclass(cls, list | dict | set)
        ):
            base.owner = weakref.ref(self)  # an iterator or view of the contents is one of the object

    def python_type(self) -> type:
        return self.cls

    @property
    def takes_over(self) -> bool:
        return hasattr(self.cls, "__torch_function__")

    def hash_key(self, trace: Trace) -> Hashable:
        hasher = trace.type_attr(self.cls, "__hash__")
        if hasher is object.__hash__ or isinstance(hasher, types.FunctionType) and _identity_hash(self.cls):
            return self if self.obj is MISSING else self.obj
        of_tuple = isinstance(self.base, TupleValue) and hasher is tuple.__hash__
        of_constant = isinstance(self.base, Constant) and not isinstance(hasher, types.FunctionType)
        if self.base is not None and (of_tuple or of_constant):
            own = isinstance(trace.type_attr(self.cls, "__eq__"), types.FunctionType)
            key = self.base.hash_key(trace)
            return ObjectKey(trace, self, hash(key)) if own else key
        trace.raise_if(hasher is None, TypeError, f"unhashable type: '{c_name(self.cls)}'")
        if isinstance(hasher, types.FunctionType):
            return ObjectKey(trace, self, trace.call_special(self, "__hash__", [], {}).as_constant())
        return super().hash_key(trace)

    # Attributes ---------------------------------------------------------------------------------------------
    def dict(self, trace: Trace) -> DictValue | None:
        """The value of `__dict__`, or None when instances have none."""
        if self._dict is None and self.cls.__dictoffset__ != 0:
            if self.obj is MISSING:
                self._dict = DictValue([])
                self._dict.born, self._dict.owner = self.born, weakref.ref(self)
            else:
                found = object.__getattribute__(self.obj, "__dict__")
                unsupported_if(
                    type(found) is not dict,
                    "unsupported-value",
                    f"{self.cls.__name__} with a special __dict__",
                )
                self._dict = checked(DictValue, trace.wrap(InstanceDict(self.source), found))
        return self._dict

    def instance_attr(self, trace: Trace, name: str) -> Value | None:
        attrs = self._dict or self.dict(trace)
        return None if attrs is None else attrs.lookup(name)

    def store_attr(self, trace: Trace, name: str, value: Value | None) -> None:
        attrs = self.dict(trace)
        if attrs is None:
            raise trace.error(AttributeError, f"'{c_name(self.cls)}' object has no attribute '{name}'")
        if value is None:
            attrs.remove(trace, name)
        else:
            attrs.store(trace, name, Constant(name), value)

    def load_slot(self, trace: Trace, descr: Any) -> Value:
        """A `__slots__` member or a C member."""
        name = descr.__name__
        if name not in self.slots and self.obj is not MISSING:
            try:
                found = descr.__get__(self.obj)
            except AttributeError:
                trace.reader.guard(Absent(Attr(self.source, name)))
                self.slots[name] = None
            else:
                self.slots[name] = trace.wrap(Attr(self.source, name), found)
        value = self.slots.get(name)
        if (
            value is None
            and name not in self.slots
            and issubclass(descr.__objclass__, BaseException)
            and descr.__objclass__.__module__ == "builtins"
        ):
            if name == "__suppress_context__":
                return trace.make("__cause__" in self.slots)
            stop = unsupported(
                "unsupported-value", f"attribute {name!r} of {self.describe()}"
            )  # a C member is never absent
            stop.whole = self.obj is MISSING  # C code would have set it, and a copy of the exception lacks it
            raise stop
        if value is None:
            raise trace.error(AttributeError, f"'{c_name(self.cls)}' object has no attribute '{name}'")
        return value

    def store_slot(self, trace: Trace, descr: Any, value: Value | None) -> None:
        """Write (None: delete) a `__slots__` member."""
        if value is None:
            self.load_slot(trace, descr)
        self.slots[descr.__name__] = value
        if self.obj is not MISSING:
            self.changed_slots[descr.__name__] = descr
            trace.effects.touch(self)
        else:
            trace.effects.change(self)

    def store_special(self, trace: Trace, descr: Any, name: str, value: Value | None) -> None:
        """Write a C getset attribute: only those of exceptions and `__class__`-free basics are known."""
        if issubclass(self.cls, BaseException) and self.obj is MISSING and value is not None:
            self.slots[name] = value
            return
        if name == "__dict__" and self.obj is MISSING and isinstance(value, DictValue):
            if self._dict is not None and owner_of(self._dict) is self:
                del self._dict.owner
            self._dict = value
            if value.source is None and owner_of(value) is None:
                value.owner = weakref.ref(self)
            return
        raise unsupported("unsupported-mutation", f"attribute {name!r} of {self.describe()} is set")

    # Contents of builtin bases ------------------------------------------------------------------------------
    def listed(self, trace: Trace) -> list[Value]:
        iterator = self.iterate(trace)
        for name in ("__len__", "__length_hint__"):
            if isinstance(trace.type_attr(self.cls, name), types.FunctionType):
                if trace.unless(TypeError, trace.call_special, self, name, [], {}) is not None:
                    break
        return [*iter(lambda: iterator.next(trace), None)]

    # Leaving the trace --------------------------------------------------------------------------------------
    def reconstruct(self, emitter: ResultEmitter) -> str:
        cls = self.cls
        if issubclass(cls, BaseException):
            name = self._reconstruct_exception(emitter)
        else:
            name = emitter.new_object(self, self._new(emitter))
            self._fill_base(emitter, name)
        if self._dict is not None and owner_of(self._dict) is self:
            for key, value in self._dict.load().values():
                emitter.statement(f"{name}.__dict__[{emitter.emit(key)}] = {emitter.emit(value)}")
        elif self._dict is not None:
            emitter.statement(
                f"{emitter.constant(object)}.__setattr__({name}, '__dict__', {emitter.emit(self._dict)})"
            )
        for slot, kept in self.slots.items():
            if kept is not None and not issubclass(cls, BaseException):
                emitter.statement(
                    f"{emitter.constant(object)}.__setattr__({name}, {slot!r}, {emitter.emit(kept)})"
                )
        return name

    def _new(self, emitter: ResultEmitter) -> str:
        cls, base = emitter.constant(self.cls), self.base
        if base is None and issubclass(self.cls, types.SimpleNamespace):
            return f"{cls}.__new__({cls})"
        if base is None:
            return f"{emitter.constant(object)}.__new__({cls})"
        if isinstance(base, ListValue | DictValue):
            kind = OrderedDict if issubclass(self.cls, OrderedDict) else base.kind
            return f"{emitter.constant(kind)}.__new__({cls})"
        if isinstance(base, SetValue):
            return f"{emitter.constant(base.kind)}.__new__({cls}, {base.text(emitter)})"
        return f"{emitter.constant(base.python_type())}.__new__({cls}, {emitter.emit(base)})"

    def _fill_base(self, emitter: ResultEmitter, name: str) -> None:
        base = self.base
        if isinstance(base, ListValue | DictValue):
            base.fill(emitter, name)
        elif isinstance(base, SetValue):
            emitter.statement(f"{base.kind.__name__}.__init__({name}, {base.text(emitter)})")

    def _reconstruct_exception(self, emitter: ResultEmitter) -> str:
        args = self.slots.get("args")
        maker = self.cls if args is None else BaseException
        name = emitter.new_object(self, f"{emitter.constant(maker)}.__new__({emitter.constant(self.cls)})")
        if args is not None:  # which may hold the exception
            emitter.statement(f"{emitter.constant(_SET_ARGS)}({name}, {emitter.emit(args)})")
        for slot in ("__cause__", "__context__", "__traceback__", "name", "obj", "value"):
            value = self.slots.get(slot)
            if value is not None:
                emitter.statement(f"{name}.{slot} = {emitter.emit(value)}")
        return name

    def replay(self, emitter: ResultEmitter) -> None:
        """Set the changed slots of the outside object (its dict and base record themselves)."""
        name = emitter.emit(self)
        for slot, descr in self.changed_slots.items():
            value = self.slots[slot]
            now = (
                "None" if value is None else emitter.emit(value)
            )  # the deleted name may not have been there before
            emitter.statement(f"{emitter.constant(descr)}.__set__({name}, {now})")
            if value is None:
                emitter.statement(f"{emitter.constant(descr)}.__delete__({name})")

    def describe(self) -> str:
        return f"an instance of {self.cls.__module__}.{self.cls.__qualname__}"


def _identity_hash(cls: type) -> bool:
    """torch.nn.Module and the like define `__hash__` as id(self)."""
    return cls.__module__.startswith("torch.") and cls.__eq__ is object.__eq__


_PLAIN: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}


def content_base(trace: Trace, cls: type, source: Source, obj: Any) -> Value | None:
    """The builtin content of an outside object whose class extends a container or a plain type."""
    if issubclass(cls, dict):
        return DictValue(None, source, obj, trace, kind=OrderedDict if issubclass(cls, OrderedDict) else dict)
    if issubclass(cls, list):
        trace.reader.guard(Length(source, list.__len__(obj)))
        return ListValue(None, source, obj, trace)
    if issubclass(cls, tuple):
        trace.reader.guard(Length(source, tuple.__len__(obj)))
        return TupleValue(None, source, obj, trace)
    for kind, content in _PLAIN.items():
        if issubclass(cls, kind):
            return trace.make(trace.reader.ask(source, obj, "the content", content))
    return None


@wrap_rule(object, subclasses=True)
def _wrap_object(trace: Trace, source: Source, obj: Any) -> Value:
    cls = type(obj)
    trace.reader.guard(TypeIs(source, cls))
    return UserObject(cls, source, obj, content_base(trace, cls, source, obj))
