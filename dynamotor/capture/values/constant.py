"""Known real objects: plain constants, classes, Python modules, builtin functions and descriptors."""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Callable, Hashable
from typing import Any

from ..breaks import unsupported, unsupported_if
from ..polyfills import cursors
from ..source import Source, trusted_module
from .base import MISSING, Iterator, ResultEmitter, Trace, Value
from .operators import special_name

# Types whose methods and operators are pure: run for real when everything is known.
PURE_TYPES: set[type] = {
    int,
    float,
    bool,
    str,
    bytes,
    complex,
    type(None),
    type(Ellipsis),
    type(NotImplemented),
    range,
    tuple,
    frozenset,
    slice,
}


# The value of a subclass's instance for operators of other builtins.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
}


def plain(value: Any) -> Constant | None:
    """The number or text that an instance of a subclass of them holds."""
    return next((Constant(held(value)) for kind, held in _PLAIN.items() if isinstance(value, kind)), None)


class Constant(Value):
    """A real object, immutable as far as the trace is concerned."""

    __slots__ = ("value",)

    def __init__(self, value: Any, source: Source | None = None) -> None:
        self.source = source
        self.value = value

    def python_type(self) -> type:
        return type(self.value)

    def is_constant(self) -> bool:
        return True

    def as_constant(self) -> Any:
        return self.value

    def real(self) -> Any:
        return self.value

    @property
    def is_plain(self) -> bool:
        """Whether operators on it may run for real."""
        return type(self.value) in PURE_TYPES

    def hash_key(self, trace: Trace) -> Hashable:
        if type(self.value).__hash__ is None:  # slices, before Python 3.12
            raise trace.error(TypeError, f"unhashable type: '{type(self.value).__name__}'")
        if type(self.value) is float and self.value != self.value and self.source is not None:
            trace.reader.guard_identity(self.source, self.value)  # as keys, NaNs are told apart
        return self.value

    def getattr(self, trace: Trace, name: str) -> Value:
        if self.is_plain:
            return self.attribute(trace, trace.real(getattr, self.value, name))
        return super().getattr(trace, name)

    def attribute(self, trace: Trace, found: Any) -> Value:
        """The value of a real attribute: C methods stay bound to this value."""
        descr = descriptor_of(found)
        if descr is not None and found.__self__ is self.value:
            return BoundBuiltin(descr, self)
        return trace.make(found)

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if self.is_plain:
            if op is operator.mod and isinstance(self.value, str) and not reflected:
                waiting = trace.late_percent(self, other)
                if waiting is not None:
                    return waiting
            if (
                other.held or other.late
            ):  # its own rule knows what may be done, also where Python asks one of two ints only
                return other.binary(trace, op, self, not reflected)
            if other.is_constant():
                pair = self, other if type(other) is Constant else Constant(other.as_constant())
                left, right = reversed(pair) if reflected else pair
                a_number = type(other) is Constant or isinstance(other, Constant) and other.symbolic
                a_class = isinstance(other.as_constant(), type) and self._takes(other.as_constant())
                if a_number or a_class or isinstance(self.value, type(other.as_constant())):
                    return trace.real_binary(op, left, right)
            base = getattr(other, "base", None)
            if (
                isinstance(base, Constant)
                and op is operator.mod
                and isinstance(self.value, str)
                and not reflected
            ):
                return trace.percent(self, other)  # asks for its text
            if isinstance(base, Constant):  # C code reads its content
                held = _held(other, base)
                repeats = op is operator.mul and isinstance(self.value, str) and not isinstance(held, int)
                side = None if repeats else getattr(type(self.value), special_name(op, reflected), None)
                return side and _implemented(trace.real_call(side, self.value, held))
            if op is operator.mod and isinstance(self.value, str) and not reflected:
                return trace.percent(self, other)
            if isinstance(self.value, tuple) and not reflected and issubclass(other.python_type(), tuple):
                return trace.make_tuple(self.unpack(trace)).binary(trace, op, other)
            return None
        return super().binary(trace, op, other, reflected)

    def _takes(self, cls: type) -> bool:
        """Whether C code may look at a class that this is compared with: NumPy makes a dtype of it."""
        unsupported_if(
            not trusted_module(cls.__module__) and type(self.value).__module__.startswith("numpy"),
            "unsupported-call",
            f"{self.value!r:.80} is compared with the class {cls.__qualname__}",
        )
        return True

    def unary(self, trace: Trace, op: Callable[..., Any]) -> Value:
        return trace.real_call(op, self.value) if self.is_plain else super().unary(trace, op)

    def truth(self, trace: Trace) -> bool:
        return bool(self.value) if self.is_plain else super().truth(trace)

    def length(self, trace: Trace) -> Value:
        return trace.real_call(len, self.value) if self.is_plain else super().length(trace)

    def getitem(self, trace: Trace, key: Value) -> Value:
        if self.is_plain:
            if key.is_constant():
                return trace.real_binary(operator.getitem, self, Constant(key.as_constant()))
            held = getattr(key, "base", None)  # of an int of a class of its own
            if not isinstance(held, Constant) or not isinstance(held.value, int):
                raise unsupported("unsupported-call", f"an item of {self.describe()} at {key.describe()}")
            return trace.real_call(operator.getitem, self.value, held.value)
        return super().getitem(trace, key)

    def contains(self, trace: Trace, item: Value) -> Value:
        if self.is_plain and item.is_constant() and not item.symbolic:
            return trace.real_call(operator.contains, self.value, item.as_constant())
        if self.is_plain and isinstance(self.value, frozenset):
            return trace.fresh(set(self.value)).contains(trace, item)
        if self.is_plain and isinstance(self.value, tuple | range):
            return Constant(any(trace.equal(item, v) for v in self.unpack(trace)))
        base = getattr(item, "base", None)
        if self.is_plain and isinstance(base, Constant):
            held = _held(item, base) if isinstance(self.value, str) else base.value
            return trace.real_call(operator.contains, self.value, held)
        if self.is_plain and isinstance(self.value, str | bytes):
            raise unsupported("unsupported-call", f"{item.describe()} is looked for in a text")
        return super().contains(trace, item)

    def iterate(self, trace: Trace) -> Iterator:
        if self.is_plain:
            return RealIterator(trace.real(iter, self.value))
        return super().iterate(trace)

    def unpack(self, trace: Trace) -> list[Value]:
        return (
            [trace.make(item) for item in self.value] if type(self.value) is tuple else super().unpack(trace)
        )

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return emitter.constant(self.value)

    def describe(self) -> str:
        return f"{self.value!r:.80}"


class Number(Constant):
    """A number that is known as something else. Its `value` specialises: what knows nothing of that reads a number,
    and is right for this number alone (a guard says so)."""

    __slots__ = ()
    symbolic = is_plain = True

    def python_type(self) -> type:
        return self.kind

    def from_outside(self) -> Any:
        """The same as a `FloatValue`, computed at each call from numbers from outside; None where it is not."""
        return None


# Defaults of rules' parameters.
NONE, TRUE, FALSE, ZERO, EMPTY = map(Constant, (None, True, False, 0, ""))


def is_none(value: Value | None) -> bool:
    """Whether an argument is None, or not given."""
    return value is None or type(value) is Constant and value.value is None


def present(value: Value | None) -> Value | None:
    """An argument, or None where it is None or not given."""
    return None if is_none(value) else value


class RealIterator(Iterator):
    """Steps a real iterator over immutable data (a str, tuple, range, ...)."""

    __slots__ = ("iterator", "done")

    def __init__(self, iterator: Any) -> None:
        super().__init__()
        self.iterator = iterator
        self.done = False

    def python_type(self) -> type:
        return type(self.iterator)

    def next(self, trace: Trace) -> Value | None:
        for item in self.iterator:
            return trace.make(item)
        return None

    def reconstruct(self, emitter: ResultEmitter) -> str:
        rest = copy.copy(self.iterator)
        if emitter.for_frame:
            return f"{emitter.constant(cursors.SequenceCursor)}({emitter.constant(tuple(rest))}, 0)"
        return f"{emitter.constant(copy.copy)}({emitter.constant(rest)})"


class BoundBuiltin(Value):
    """A C method bound to a value: `[].append`, `"".join`."""

    __slots__ = ("descr", "instance")
    kind = types.BuiltinMethodType

    def __init__(self, descr: Any, instance: Value, source: Source | None = None) -> None:
        self.descr, self.instance, self.source = descr, instance, source

    def is_constant(self) -> bool:
        return isinstance(self.instance, Constant)

    def as_constant(self) -> Any:
        real = self.instance.as_constant()
        return self.descr.__get__(real, type(real))

    def hash_key(self, trace: Trace) -> Hashable:
        return self.as_constant()

    def getattr(self, trace: Trace, name: str) -> Value:
        if name == "__self__":
            return self.instance
        if name in ("__name__", "__qualname__", "__doc__"):
            return trace.make(getattr(self.descr, name))
        raise trace.error(AttributeError, f"'builtin_function_or_method' object has no attribute '{name}'")

    def call(self, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return trace.call_builtin(self.descr, [self.instance, *args], kwargs)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        # The class may have another of this name. CPython crashes where the class is left out.
        cls = emitter.constant(self.instance.python_type())
        return f"{emitter.constant(self.descr)}.__get__({emitter.emit(self.instance)}, {cls})"

    def describe(self) -> str:
        return f"method {self.descr.__name__!r} of {self.instance.describe()}"


class BoundClassBuiltin(BoundBuiltin):
    """A C class method bound to a class: `Function.apply` of PyTorch 2.14."""

    __slots__ = ()

    def as_constant(self) -> Any:
        return self.descr.__get__(None, self.instance.as_constant())

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return f"{emitter.constant(self.descr)}.__get__(None, {emitter.emit(self.instance)})"


def class_descriptor_of(method: Any) -> Any:
    """The descriptor that a bound C class method was made by; None for any other object."""
    owner = getattr(method, "__self__", None)
    if isinstance(owner, type):
        for cls in owner.__mro__:
            descr = cls.__dict__.get(method.__name__)
            if isinstance(descr, types.ClassMethodDescriptorType) and descr.__get__(None, owner) == method:
                return descr
    return None


def descriptor_of(method: Any) -> Any:
    """The descriptor on an object's class that a bound C method was made by; None for other callables."""
    if not isinstance(method, types.BuiltinMethodType | types.MethodWrapperType):
        return None
    owner = method.__self__
    for cls in type(owner).__mro__:
        descr = cls.__dict__.get(method.__name__)
        if (
            isinstance(descr, types.MethodDescriptorType | types.WrapperDescriptorType)
            and descr.__get__(owner, type(owner)) == method
        ):
            return descr
    return None


def _held(value: Value, base: Constant) -> Any:
    """An instance of a subclass for C code that reads its content and names its type."""
    return base.value if value.real() is MISSING else value.real()


def _implemented(result: Value) -> Value | None:
    return None if result.is_constant() and result.as_constant() is NotImplemented else result
