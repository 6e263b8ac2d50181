"""CPython's object protocols over values: attribute lookup, operators, truth, iteration, special methods.

Everything that is looked up on a class goes through `type_attr`, which guards it, whether found or absent.
"""

# Values are asked with the trace, which this class is a part of.
# mypy: disable-error-code="arg-type"

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..base.narrowing import checked
from .breaks import OfTrace, unsupported, unsupported_if
from .guards import Absent, DigitLimit, IdIs, MroIs
from .source import Const, Missing, Source, TypeAttr, lookup_type_attr, trusted_module
from .values.array import real_result
from .values.base import MISSING, NONE_CALLED, Raised, Value, binders, find_rule
from .values.class_attributes import ClassWrites, PendingAttribute, pending_attribute
from .values.constant import Constant
from .values.known_data import known
from .values.lazy_text import late_percent
from .values.number import FloatValue
from .values.operators import COMPARE, INPLACE, c_name, like
from .values.picked import PickedValue, picked_binary
from .values.size import QuotientValue, SizeValue, symbolic_binary
from .values.tensor import TensorValue
from .values.user_object import UserObject

_trusted_classes: set[type] = {object}  # users' classes may go, with all that they close over


def trusted_class(cls: type) -> bool:
    """Whether a class and all its bases are taken as constant: builtins, the standard library, torch except
    its modules.
    """
    known = cls in _trusted_classes or all(
        trusted_module(k.__module__) and not k.__module__.startswith("torch.nn.modules") for k in cls.__mro__
    )
    if known:
        _trusted_classes.add(cls)
    return known


def is_data_descriptor(raw: Any) -> bool:
    """Whether an object found on a class wins over the instance's own entry."""
    kind = type(raw)
    return hasattr(kind, "__set__") or hasattr(kind, "__delete__")


def _fits(number: Any, least: int) -> bool:
    return type(number) is int and least <= number <= sys.maxsize and number != -1


# What CPython says of an object whose class lacks a special method.
_LACKS = {
    "__call__": "'{}' object is not callable",
    "__len__": "object of type '{}' has no len()",
    "__getitem__": "'{}' object is not subscriptable",
    "__setitem__": "'{}' object does not support item assignment",
    "__delitem__": "'{}' object doesn't support item deletion",
    "__iter__": "'{}' object is not iterable",
    "__contains__": "argument of type '{}' is not iterable",
    "__next__": "'{}' object is not an iterator",
    "__index__": "'{}' object cannot be interpreted as an integer",
    "__reversed__": "'{}' object is not reversible",
    "__neg__": "bad operand type for unary -: '{}'",
    "__pos__": "bad operand type for unary +: '{}'",
    "__invert__": "bad operand type for unary ~: '{}'",
    "__abs__": "bad operand type for abs(): '{}'",
    "__round__": "type {} doesn't define __round__ method",
}

# The error where the class sets the method to None. Other methods are called.
_IS_NONE = {
    "__iter__": "'{}' object is not iterable",
    "__contains__": "'{}' object is not a container",
    "__reversed__": "'{}' object is not reversible",
    "__hash__": "unhashable type: '{}'",
}

# Result types of special methods that CPython checks: another class, or a value out of range, has errors of its own.
_GIVES: dict[str, type] = {
    "__bool__": bool, "__len__": int, "__hash__": int, "__index__": int, "__int__": int, "__float__": float,
    "__complex__": complex, "__str__": str, "__repr__": str, "__format__": str, "__bytes__": bytes,
}  # fmt: skip
_LEAST = {"__len__": 0, "__hash__": -sys.maxsize}


class Guarding(Protocol):
    """The part of a trace's reader that lookups use."""

    watchers: list[Callable[[Any], None]]

    def guard(self, row: Any) -> None:
        """Install a guard row."""

    def guard_distinct(self, first: Source, second: Source) -> None:
        """Two objects stay different ones."""

    def attribute(self, source: Source, obj: Any, name: str) -> Value | None:
        """An attribute as C code gives it."""


class Changes(Protocol):
    """The part of a trace's effects that lookups use."""

    @property
    def changes_objects(self) -> bool:
        """Whether an outside object has a pending change."""


class ObjectProtocol:
    """The generic half of `Trace`: what CPython's object.c and abstract.c do."""

    reader: Guarding
    effects: Changes
    if TYPE_CHECKING:
        call: Callable[..., Value]
        tail_call: Callable[..., Value]
        make: Callable[[Any], Value]
        fresh: Callable[[Any], Value]
        wrap: Callable[[Any, Any], Value]
        error: Callable[..., Raised]

    def __init__(self) -> None:
        self._type_attrs: dict[tuple[type, str], Any] = {}
        self.class_writes: dict[type, ClassWrites] = {}

    # Lookup on classes --------------------------------------------------------------------------------------
    def type_attr(self, cls: type, name: str) -> Any:
        """The entry of `cls`'s MRO under `name`, unbound, or MISSING; guarded."""
        cache = self._type_attrs
        raw = cache.get((cls, name), cache)
        if raw is not cache and (type(raw) is PendingAttribute or not self.reader.watchers):
            return raw  # else a function that PyTorch calls a second time depends on it, too
        if self.class_writes:
            pending = pending_attribute(self, cls, name)
            if pending is not None:
                cache[(cls, name)] = pending
                return pending
        try:
            raw = lookup_type_attr(cls, name)
        except Missing:
            raw = MISSING
        if not trusted_class(cls):
            source = TypeAttr(Const(cls, cls.__qualname__), name)
            if raw is MISSING:
                self.reader.guard(Absent(source))
            else:
                self.wrap(source, raw)
        elif raw is not MISSING and cls.__module__.startswith("torch"):
            self.reader.guard(IdIs(TypeAttr(Const(cls, cls.__qualname__), name), raw))
        cache[(cls, name)] = raw
        return raw

    def forget_type_attr(self, name: str) -> None:
        """The attribute of a class has changed: it is looked up again."""
        for key in [key for key in self._type_attrs if key[1] == name]:
            del self._type_attrs[key]

    def derives(self, cls: type, kind: Any) -> bool:
        """Whether `kind` is in the method resolution order of a class; guarded."""
        if not isinstance(kind, type):
            return self.real_call(isinstance, None, kind).as_constant()  # raises what isinstance() does
        if not trusted_class(cls):
            self.reader.guard(MroIs(Const(cls, cls.__qualname__), cls.__mro__))
        return kind in type.__dict__["__mro__"].__get__(cls)

    def type_attr_value(self, cls: type, name: str, raw: Any) -> Value:
        """The value of what `type_attr` found."""
        if type(raw) is PendingAttribute:
            return raw.value
        if trusted_class(cls):
            return self.make(raw)
        return self.wrap(TypeAttr(Const(cls, cls.__qualname__), name), raw)

    def bind(self, raw: Any, name: str, instance: Value, cls: type) -> Value:
        """`raw.__get__(instance, cls)` for something found on the class of an instance."""
        owner = next((cls for cls in type(raw).__mro__ if "__get__" in vars(cls)), object)
        binder = binders.get(owner)
        if binder is not None:
            return binder(self, raw, name, instance, cls)
        value = self.type_attr_value(cls, name, raw)
        getter = getattr(type(raw), "__get__", None)
        if getter is None:
            return value
        if isinstance(getter, types.FunctionType):
            return self.call(self.make(getter), [value, instance, self.make(cls)])
        raise unsupported("unsupported-value", f"descriptor {type(raw).__name__} of {cls.__name__}.{name}")

    def has_special(self, value: Value, name: str) -> bool:
        """Whether the type of a value has a special method: one set to None counts, and refuses its calls."""
        return self.type_attr(value.python_type(), name) is not MISSING

    def call_special(self, value: Value, name: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """`type(value).name(value, *args, **kwargs)`: special methods skip the instance."""
        cls = value.python_type()
        raw = self.type_attr(cls, name)
        if raw is None:
            raise self.error(TypeError, _IS_NONE.get(name, NONE_CALLED).format(c_name(cls)))
        if raw is MISSING:
            raise self.error(
                TypeError, _LACKS.get(name, "'{}' object does not support " + name).format(c_name(cls))
            )
        method = self.bind(raw, name, value, cls)
        if name not in _GIVES or isinstance(value, TensorValue):
            return self.tail_call(method, args, kwargs)
        found = self.call(method, args, kwargs)
        small = type(found) is Constant and name in _LEAST and not _fits(found.value, _LEAST[name])
        unsupported_if(
            found.python_type() is not _GIVES[name] or small,
            "unsupported-call",
            f"{name} of {value.describe()} gives {found.describe()}",
        )
        return found

    # Attributes ---------------------------------------------------------------------------------------------
    def foreign_getattr(self, value: Value, cls: type, name: str) -> Value:
        """An attribute of a C type with a lookup of its own (threading.local, weakref.proxy): asked for real,
        at each call.
        """
        obj = value.real()
        if obj is MISSING or value.source is None or self.effects.changes_objects:
            raise unsupported(
                "unsupported-value",
                f"attribute {name!r} of {value.describe()}, whose class has its own lookup",
            )
        return self.attribute_now(value.source, obj, name)

    def attribute_now(self, source: Source, obj: Any, name: str) -> Value:
        """`obj.name` as it is at each call, or the error that it raises."""
        found = self.reader.attribute(source, obj, name)
        return self.real(getattr, obj, name) if found is None else found

    def object_getattr(self, value: Value, cls: type, name: str) -> Value:
        """The lookup order of `object.__getattribute__` over the class `cls` of a value."""
        raw = self.type_attr(cls, name)
        if raw is not MISSING and is_data_descriptor(raw):
            return self.bind(raw, name, value, cls)
        found = value.instance_attr(self, name)
        if found is not None:
            return found
        return self.no_attr(value, name) if raw is MISSING else self.bind(raw, name, value, cls)

    def getattr_hook(self, value: Value, cls: type, name: str, find: Callable[[], Value]) -> Value:
        """The result of a lookup; where it raises an AttributeError, that of `__getattr__` if there is one."""
        try:
            return find()
        except Raised as raised:
            hook = self.type_attr(cls, "__getattr__") if raised.is_a(AttributeError) else MISSING
            if hook is MISSING:
                raise
        return self.call(self.bind(hook, "__getattr__", value, cls), [Constant(name)])

    def no_attr(self, value: Value, name: str) -> Value:
        """Raise that there is no such attribute."""
        text = f"'{c_name(value.python_type())}' object has no attribute '{name}'"
        raised = self.error(AttributeError, text)
        checked(UserObject, raised.value).slots.update(name=Constant(name), obj=value)
        raise raised

    def object_setattr(self, value: Value, cls: type, name: str, *new: Value) -> None:
        """`object.__setattr__`; without a value `object.__delattr__`."""
        raw, after = self.type_attr(cls, name), new[0] if new else None
        hook = getattr(type(raw), "__set__" if new else "__delete__", None)
        if raw is MISSING or not is_data_descriptor(raw):
            if after is None and value.instance_attr(self, name) is None:
                self.no_attr(value, name)
            value.store_attr(self, name, after)
        elif type(raw) is property:
            fn = raw.fset if new else raw.fdel
            if fn is None:
                raise self.error(AttributeError, _what_a_property_lacks(raw, cls, bool(new)))
            self.call(self.make(fn), [value, *new])
        elif type(raw) is types.MemberDescriptorType:
            if not hasattr(value, "store_slot"):
                raise unsupported("unsupported-mutation", f"slot {name!r} of {value.describe()} is set")
            value.store_slot(self, raw, after)
        elif isinstance(hook, types.FunctionType):
            self.call(self.make(hook), [self.type_attr_value(cls, name, raw), value, *new])
        else:
            value.store_special(self, raw, name, after)  # type: ignore[attr-defined]

    def unless(self, errors: type | tuple[type, ...], call: Callable[..., Value], *args: Any) -> Value | None:
        """A call's result; None where it raises one of these exceptions."""
        try:
            return call(*args)
        except Raised as raised:
            if raised.is_a(errors):
                return None
            raise

    def getattr_or_none(self, value: Value, name: str) -> Value | None:
        """`getattr(value, name, None)` that tells absence (None) from a None value."""
        return self.unless(AttributeError, value.getattr, self, name)

    # Operators ----------------------------------------------------------------------------------------------
    def real(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function on real objects; its exception becomes the program's."""
        try:
            found = real_result(self, fn, args, kwargs)
        except OfTrace:
            raise
        except Exception as error:
            refused = isinstance(error, ValueError) and fn is int
            if refused or DigitLimit.concerns(args):  # the text of an integer that may be too long
                self.reader.guard(DigitLimit.current())
            raise self.real_error(error) from None
        if DigitLimit.concerns((args, found)):
            self.reader.guard(DigitLimit.current())
        return found

    def real_call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """The value of a pure function's result for real objects."""
        return self.fresh(self.real(fn, *args, **kwargs))

    def real_binary(self, op: Callable[..., Any], left: Constant, right: Constant) -> Value:
        """`left op right`; what gives an operand itself (a tuple times one) is that operand."""
        found = self.real(op, left.value, right.value)
        for operand in (left, right):
            if type(found) is tuple and found is operand.value:
                return operand
        return self.fresh(found)

    def real_error(self, error: BaseException) -> Raised:
        """A real exception as an exception of the traced program. Depth is capture's own: it stops the trace."""
        if isinstance(error, RecursionError):
            raise error
        raised = self.error(type(error), *error.args)
        if isinstance(error, AttributeError | NameError | ImportError):
            checked(UserObject, raised.value).slots["name"] = Constant(error.name)
        return raised

    def binary(self, op: Callable[..., Any], left: Value, right: Value) -> Value:
        """`left op right` for arithmetic, in-place and comparison operators."""
        if type(left) is Constant and type(right) is Constant and left.is_plain and right.is_plain:
            return self.real_binary(op, left, right)
        if op in (operator.mod, operator.imod) and type(left) is Constant and left.python_type() is str:
            waiting = late_percent(self, left, right)
            if waiting is not None:
                return waiting
        if left.symbolic or right.symbolic:
            result = symbolic_binary(self, op, left, right)
            if result is not None:
                return result
        if type(left) is PickedValue or type(right) is PickedValue:
            result = picked_binary(self, op, left, right)
            if result is not None:
                return result
        inplace, as_asked = INPLACE.get(op), op
        unsupported_if(
            op is operator.imul and not isinstance(left, Constant) and issubclass(left.python_type(), int),
            "unsupported-call",
            "*= of an int of a class of its own, which asks no sequence",
        )
        if inplace is not None:
            result = left.binary(self, op, right)
            if result is not None:
                return result
            op = inplace
        lcls, rcls = left.python_type(), right.python_type()
        if lcls is not rcls and issubclass(rcls, lcls):
            result = right.binary(self, op, left, True)
            if result is None:
                result = left.binary(self, op, right)
        else:
            result = left.binary(self, op, right)
            if result is None and (lcls is not rcls or op in COMPARE):
                result = right.binary(self, op, left, True)
        if result is not None:
            return result
        if op is operator.eq or op is operator.ne:
            return Constant(self.same(left, right) == (op is operator.eq))
        unsupported_if(
            torch.Tensor in (lcls, rcls),
            "unsupported-call",
            f"{op.__name__} of {lcls.__name__} and {rcls.__name__}",
        )
        unsupported_if(
            op is operator.mul
            and any(
                issubclass(v.python_type(), int) < self.has_special(v, "__index__") for v in (left, right)
            ),
            "unsupported-call",
            "a sequence is multiplied by something other than an int",
        )
        unsupported_if(lcls is bytes and op is operator.mod, "unsupported-call", "% of bytes")
        self.real(as_asked, like(lcls), like(rcls))
        raise unsupported("unsupported-call", f"{op.__name__} of {left.describe()} and {right.describe()}")

    def same(self, left: Value, right: Value) -> bool:
        """`left is right`."""
        if left is right:
            return True
        if (
            type(left) is SizeValue or type(right) is SizeValue
        ):  # small integers are one object: equal ones count as the same
            return left.python_type() is int is right.python_type() and self.truth(
                self.binary(operator.eq, left, right)
            )
        if {FloatValue, QuotientValue} & {
            type(left),
            type(right),
        } and left.python_type() is not right.python_type():
            return False
        if isinstance(left, Constant) and isinstance(right, Constant):
            a, b = left.value, right.value
            return a is b or (
                type(a) is type(b) and type(a) in (int, str, bool, float) and left.is_plain and a == b
            )
        a = left.real()
        if a is not MISSING and a is right.real():
            return True
        if left.python_type() is tuple is right.python_type() and not (self.truth(left) or self.truth(right)):
            return True  # there is one empty tuple
        if left.source is not None and right.source is not None and left.python_type() is right.python_type():
            self.reader.guard_distinct(left.source, right.source)
        return False

    def truth(self, value: Value) -> bool:
        """`bool(value)`."""
        tail, self.tail = getattr(self, "tail", False), False
        data = known(self, value) if type(value) is TensorValue else None
        try:
            return value.truth(self) if data is None or data.numel() != 1 else bool(data)
        finally:
            self.tail = tail

    def equal(self, left: Value, right: Value) -> bool:
        """`left is right or left == right`, what containers use."""
        return self.same(left, right) or self.truth(self.binary(operator.eq, left, right))

    def must_iterate(self, value: Value, message: str) -> None:
        """Raise with this message where a value has no way to be iterated."""
        if not self.can_iterate(value):
            raise self.error(TypeError, message.format(c_name(value.python_type())))

    def can_iterate(self, value: Value) -> bool:
        """Whether a value has a way to be iterated."""
        own = type(value).iterate not in (Value.iterate, Constant.iterate)
        iterates = self.type_attr(value.python_type(), "__iter__")
        if iterates is MISSING:
            return own or self.has_special(value, "__getitem__")
        return own or iterates is not None


__all__ = ["ObjectProtocol", "find_rule", "is_data_descriptor", "trusted_class"]


def _what_a_property_lacks(found: property, cls: type, sets: bool) -> str:
    """CPython's words for a write that a property does not take; it alone knows whether the property was told
    its name.
    """
    try:
        found.__set__(None, None) if sets else found.__delete__(None)
    except AttributeError as error:
        return str(error).replace("'NoneType'", f"'{cls.__qualname__}'")
    return ""
