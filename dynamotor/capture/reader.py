"""`Reader.wrap(source, obj)` makes the value of an object from outside and installs the guards of that read. All
such objects enter a trace by a `Reader`.

>>> value = reader.wrap(DictItem(InstanceDict(Arg(0, "self")), "eps"), 1e-5)   # guard: self.eps == 1e-05
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from ..base.errors import UserLine
from ..base.events import listening
from .breaks import unsupported_if
from .guards import Absent, Answer, ConstEquals, Distinct, IdIs, SameObject, TypeIs, answer_of
from .source import Attr, Const, DictItem, Source
from .values.base import IdentityKey, Trace, Value, wrap_base, wrap_exact
from .values.constant import Constant
from .values.containers import DictValue, SequenceValue, SetValue
from .values.function import CellValue, FunctionValue
from .values.lazy_text import outside_text
from .values.number import FloatValue
from .values.size import SizeValue
from .values.user_object import UserObject

LITERALS = frozenset(
    (int, float, bool, str, bytes, complex, type(None), type(Ellipsis), type(NotImplemented))
)

# Rows that always hold for a `Const`, a source that the entry itself keeps.
_TRUE_OF_CONST = frozenset((IdIs, TypeIs, ConstEquals))


# Values whose slots hold other values, until the trace ends. Numbers are not among them: guards compute with theirs.
_HOLDERS = (SequenceValue, DictValue, SetValue, CellValue, FunctionValue, UserObject)


@functools.cache
def _slots_of(cls: type) -> tuple[Any, ...]:
    """The descriptors of the slots in which values of this class hold others."""
    if not issubclass(cls, _HOLDERS):
        return ()
    names = ((base, name) for base in cls.__mro__[:-1] for name in vars(base).get("__slots__", ()))
    return tuple(vars(base)[name] for base, name in names if name not in ("source", "__weakref__"))


class Reader:
    """Holds the guards of a trace and the value of each outside object seen."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        # Each row, with the user's line that read it if something listens to captures.
        self.guards: dict[Any, UserLine | None] = {}
        self.heard = listening("capture")
        # A function that PyTorch calls a second time, while it is read: it depends on the facts that it asks for.
        self.watchers: list[Callable[[Any], None]] = []
        self.values: dict[int, Value] = {}
        self._kept: list[Any] = []

    def guard(self, row: Any) -> None:
        """Install a guard row (once). Rows that always hold are dropped: types, identities and values of a
        `Const`."""
        if type(row) in _TRUE_OF_CONST and type(row.source) is Const:
            return
        for meet in self.watchers:
            meet(row)
        if not self.heard:
            self.guards.setdefault(row)
        elif row not in self.guards:
            self.guards[row] = self.trace.stack.user_line()

    def wrap(self, source: Source, obj: Any) -> Value:
        """The value of `obj`, which `source` leads to. See `Trace.wrap`."""
        cls = type(obj)
        if cls in LITERALS:
            size = self.trace.sizes.integer(source, obj) if cls is int else None
            if size is not None:
                self.guard(TypeIs(source, int))
                return SizeValue(self.trace, size)
            if cls is float and self.trace.sizes.takes_float(source):
                self.guard(TypeIs(source, float))
                return FloatValue(self.trace, source, obj)
            if cls is str and source in self.trace.sizes.policy.varying:
                self.guard(TypeIs(source, str))
                return outside_text(self.trace, source, obj)
            self.guard(ConstEquals(source, obj))
            return Constant(obj, source)
        known = self.values.get(id(obj))
        if known is not None:
            self._same(source, known, obj)
            for meet in self.watchers:
                meet(IdIs(source, obj))
            return known
        rule = wrap_exact.get(cls)
        if rule is None:
            for base, candidate in wrap_base:
                if issubclass(cls, base):
                    rule = candidate
                    break
            assert rule is not None, cls
        value = rule(self.trace, source, obj)
        self.adopt(obj, value)
        return value

    def guard_identity(self, source: Source, obj: Any) -> None:
        """The object is this one."""
        self.guard(IdIs(source, obj))

    def ask(self, source: Source, obj: Any, text: str, question: Callable[[Any], Any]) -> Any:
        """The answer of a Python question (named by `text`) about the object, asked again at each call. The
        answer is a constant, an object that stays one, or the exception that it raises, raised here too."""
        answer = answer_of(question, obj)
        self.guard(Answer(source, question, answer, text))
        return question(obj) if isinstance(answer, type) and issubclass(answer, Exception) else answer

    def attribute(self, source: Source, obj: Any, name: str) -> Value | None:
        """`obj.name` as C code gives it (a slot, a getset, a type with a lookup of its own), read again at
        each call; None when there is none."""
        try:
            found = getattr(obj, name)
        except AttributeError:
            self.guard(Absent(Attr(source, name)))
            return None
        value = self.trace.wrap(Attr(source, name), found)
        unsupported_if(
            IdIs(Attr(source, name), found) in self.guards and getattr(obj, name) is not found,
            "unsupported-value",
            f"attribute {name!r} of a {type(obj).__name__} is a new object at each read",
        )
        return value

    def miss_again(self, source: Source, key: Any) -> None:
        """A key that an outside dict lacks, which is known already, is looked up again: a function that PyTorch
        calls a second time depends on it, too."""
        for meet in self.watchers:
            meet(Absent(DictItem(source, key)))

    def guard_distinct(self, first: Source, second: Source) -> None:
        """Two different objects must not be one at the next call."""
        if not (type(first) is Const and type(second) is Const):
            self.guard(Distinct(first, (second,)))

    def guard_key(self, key: Any, among: Iterable[Value] | None) -> None:
        """A key is looked up by identity: in an outside container (`among` is None) it must stay this object,
        in one made in the trace it must stay different from the other keys `among` which it is."""
        if type(key) is tuple:
            for part in key:
                self.guard_key(part, among)
            return
        if isinstance(key, IdentityKey):
            return key.refuse_numbers(among)
        value = self.values.get(id(key))
        if value is None or value.source is None or value.real() is not key:
            return
        if among is None:
            self.guard(IdIs(value.source, key))
            return
        for other in among:
            if other is not value and other.source is not None and other.python_type() is value.python_type():
                self.guard_distinct(value.source, other.source)

    def forget(self) -> None:
        """Release the values of outside objects. Objects that refer to each other (a module's functions and its globals,
        a layer and its owner) have values that do so too, and Python's collector would be the first to free them.
        """
        for value in self.values.values():
            kind: type = type(value)
            for slot in _slots_of(kind):
                slot.__set__(value, None)

    def adopt(self, obj: Any, value: Value) -> None:
        """Remember that `value` stands for `obj`."""
        self.values[id(obj)] = value
        self._kept.append(obj)

    def _same(self, source: Source, known: Value, obj: Any) -> None:
        """The object was met before along another path: both paths must lead to one object at the next call
        too.
        """
        first = known.source
        if first is None or first == source:
            return
        if type(first) is Const:
            self.guard(IdIs(source, obj))
        elif type(source) is Const:
            self.guard(IdIs(first, obj))
        else:
            self.guard(SameObject(source, (first,)))
