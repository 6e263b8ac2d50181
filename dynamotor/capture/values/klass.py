"""Classes, Python modules, `super()`, and how each kind of descriptor binds to an instance."""

from __future__ import annotations

import enum
import functools
import operator
import types
import typing
from collections import namedtuple
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ...base import compat
from ...base.narrowing import checked
from ...base.registry import register_all
from ..breaks import unsupported, unsupported_if
from ..guards import Absent, ConstEquals, IdIs
from ..protocol import is_data_descriptor, trusted_class
from ..source import Attr, Const, DictItem, InstanceDict, Source, trusted_module
from .arguments import fitted
from .base import (
    MISSING,
    Raised,
    ResultEmitter,
    Trace,
    Value,
    binders,
    builtin_rule,
    find_rule,
    run_rule,
    under_modes,
    wrap_held,
    wrap_rule,
)
from .class_attributes import set_class_attribute
from .constant import (
    PURE_TYPES,
    BoundBuiltin,
    BoundClassBuiltin,
    Constant,
    class_descriptor_of,
    descriptor_of,
    plain,
)
from .containers import DictValue
from .function import BoundMethod, FunctionValue
from .user_object import UserObject

PURE_TYPES.update(
    {
        torch.dtype,
        torch.device,
        torch.Size,
        torch.layout,
        torch.memory_format,
        torch.finfo,
        torch.iinfo,
        torch.qscheme,
    }
)


def _is_programs(method: Any) -> bool:
    """Whether a program wrote the method, which may give something else at each call."""
    return isinstance(method, types.FunctionType) and method.__module__ not in ("enum", "typing")


class ClassValue(Constant):
    """A class. Its attributes are guarded like those that instances find on it."""

    __slots__ = ()

    def getattr(self, trace: Trace, name: str) -> Value:
        cls = self.value
        meta = type(cls)
        if name in _CLASS_SLOTS:
            return self.slot(trace, name)
        if name == "__dict__":
            unsupported_if(
                cls in trace.class_writes,
                "unsupported-value",
                f"`__dict__` of {self.describe()} is read after a write",
            )
            return TypeDictValue(trace, cls)
        on_meta = trace.type_attr(meta, name)
        if on_meta is not MISSING and is_data_descriptor(on_meta) and name not in ("__abstractmethods__",):
            return trace.bind(on_meta, name, self, meta)
        raw = trace.type_attr(cls, name)
        if raw is not MISSING:
            return self._bind(trace, raw, name)
        if on_meta is not MISSING:
            return trace.bind(on_meta, name, self, meta)
        hook = trace.type_attr(meta, "__getattr__")
        if hook is not MISSING:
            return trace.call(trace.bind(hook, "__getattr__", self, meta), [Constant(name)])
        raise trace.error(AttributeError, f"type object '{cls.__name__}' has no attribute '{name}'")

    def slot(self, trace: Trace, name: str) -> Value:
        """What `type` itself keeps for a class; that of libraries' classes is constant."""
        if trusted_class(self.value):
            return trace.make(getattr(self.value, name, None))
        return trace.attribute_now(Const(self.value, self.value.__qualname__), self.value, name)

    def _bind(self, trace: Trace, raw: Any, name: str) -> Value:
        cls, kind = self.value, type(raw)
        value = trace.type_attr_value(cls, name, raw)
        if kind in _CLASS_METHODS:
            return _bind_to_class(trace, raw, name, self)
        if kind is staticmethod:
            return trace.make(raw.__func__)
        if kind is types.BuiltinFunctionType and name == "__new__":
            return trace.make(getattr(cls, name))
        getter = getattr(kind, "__get__", None)
        if isinstance(getter, types.FunctionType):
            if issubclass(kind, types.DynamicClassAttribute | enum.property):
                return trace.make(getattr(cls, name))
            return trace.call(trace.make(getter), [value, Constant(None), self])
        return value

    def setattr(self, trace: Trace, name: str, value: Value) -> None:
        unsupported_if(
            trusted_class(self.value),
            "unsupported-mutation",
            f"attribute {name!r} of class {self.value.__name__} is set",
            "the class is a library's",
        )
        set_class_attribute(trace, self.value, name, value)

    def delattr(self, trace: Trace, name: str) -> None:
        raise unsupported(
            "unsupported-mutation", f"attribute {name!r} of class {self.value.__name__} is deleted"
        )

    def getitem(self, trace: Trace, key: Value) -> Value:
        if _is_programs(trace.type_attr(type(self.value), "__getitem__")):
            return super().getitem(trace, key)
        generic = trace.type_attr(self.value, "__class_getitem__")
        if _is_programs(getattr(generic, "__func__", None)):
            return trace.call(self.getattr(trace, "__class_getitem__"), [key])
        if key.is_constant():
            return trace.real_call(lambda: self.value[key.as_constant()])
        unsupported_if(generic is not MISSING, "unsupported-call", f"{self.describe()}[{key.describe()}]")
        return super().getitem(trace, key)

    def binary(self, trace: Trace, op: Any, other: Value, reflected: bool = False) -> Value | None:
        own = _is_programs(trace.type_attr(type(self.value), "__ror__" if reflected else "__or__"))
        if op.__name__ == "or_" and other.is_constant() and not own:
            a, b = (other.as_constant(), self.value) if reflected else (self.value, other.as_constant())
            return trace.real_call(op, a, b)
        return super().binary(trace, op, other, reflected)

    def call(self, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
        trace.tail = False
        found = under_modes(trace, self.value, args, kwargs) if trace.calls.modes else None
        if found is not None:
            return found
        rule = find_rule(self.value, args)
        if rule is not None:
            return run_rule(trace, self.value, rule, *fitted(self.value, args, kwargs))
        return trace.instantiate(self.value, args, kwargs)

    def describe(self) -> str:
        return f"class {self.value.__name__}"


wrap_held(ClassValue, type, subclasses=True)


_CLASS_SLOTS = frozenset(
    {
        "__name__",
        "__qualname__",
        "__module__",
        "__mro__",
        "__bases__",
        "__base__",
        "__doc__",
        "__flags__",
        "__basicsize__",
        "__dictoffset__",
        "__text_signature__",
        "__class__",
    }
)


class TypeDictValue(DictValue):
    """The `__dict__` of a class: a read-only mapping whose items are guarded as class attributes."""

    __slots__ = ("cls",)

    def __init__(self, trace: Trace, cls: type) -> None:
        super().__init__(None, None, dict(cls.__dict__), trace, trusted=True, kind=types.MappingProxyType)
        self.cls = cls

    def load(self) -> dict[Hashable, tuple[Value, Value]]:
        if not self.complete and not trusted_class(self.cls):
            self.trace.reader.ask(Const(self.cls, self.cls.__qualname__), self.cls, "the names", _own_names)
        return super().load()

    def lookup(self, key: Hashable) -> Value | None:
        if isinstance(key, str):
            self.trace.type_attr(self.cls, key)  # guards presence and absence
        return super().lookup(key)

    def _read(self, key: Any) -> Value:
        raw = self.trace.type_attr(self.cls, key)
        return self.trace.make(raw if raw is not MISSING else self.obj[key])

    def setitem(self, trace: Trace, key: Value, value: Value) -> None:
        trace.real(operator.setitem, _READ_ONLY, None, None)

    def delitem(self, trace: Trace, key: Value) -> None:
        number = 0 if hasattr(key.python_type(), "__index__") else None  # it has a text of its own
        trace.real(operator.delitem, _READ_ONLY, number)

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if op is operator.ior:
            trace.real(op, _READ_ONLY, {})
        return super().binary(trace, op, other, reflected)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return f"{emitter.constant(self.cls)}.__dict__"


_READ_ONLY: Any = types.MappingProxyType({})


def _own_names(cls: type) -> tuple[str, ...]:
    return tuple(type.__dict__["__dict__"].__get__(cls))


class PythonModule(Constant):
    """A Python module; the names of users' modules are guarded, those of torch and the standard library are
    not.
    """

    __slots__ = ("dict",)

    def __init__(self, trace: Trace, value: types.ModuleType, source: Source | None) -> None:
        super().__init__(value, source)
        known = trace.reader.values.get(id(value.__dict__))
        if known is None:
            known = DictValue(
                None,
                Const(value.__dict__, f"{value.__name__}.__dict__"),
                value.__dict__,
                trace,
                trusted=trusted_module(value.__name__),
            )
            trace.reader.adopt(value.__dict__, known)
        self.dict = checked(DictValue, known)

    def getattr(self, trace: Trace, name: str) -> Value:
        if name == "__dict__":
            return self.dict
        found = self.dict.lookup(name)
        if found is not None:
            return found
        # A lazily imported name (transformers' modules): fetching it fills the module's dict.
        source = Const(self.value, self.value.__name__)
        try:
            trace.real(getattr, self.value, name)
        except Raised as raised:  # a `__getattr__` that the module or its class gets later may answer
            if not self.dict.trusted and raised.is_a(AttributeError):
                trace.reader.guard(Absent(Attr(source, name)))
            raise
        self.dict.absent.discard(name)
        trace.reader.guards.pop(Absent(DictItem(self.dict.source, name)), None)
        found = self.dict.lookup(name)
        if found is None:  # the module's class or its `__getattr__` answers (torch.backends.*)
            return trace.attribute_now(source, self.value, name)
        return found

    def setattr(self, trace: Trace, name: str, value: Value) -> None:
        self._check_plain(trace, name)
        self.dict.store(trace, name, Constant(name), value)

    def _check_plain(self, trace: Trace, name: str) -> None:
        """A module of a class of its own (torch.backends.*) may do anything when a name is set."""
        setter, own = (trace.type_attr(type(self.value), attr) for attr in ("__setattr__", name))
        if setter is not object.__setattr__ or own is not MISSING and is_data_descriptor(own):
            raise unsupported("unsupported-mutation", f"{name!r} of module {self.value.__name__} is set")

    def delattr(self, trace: Trace, name: str) -> None:
        self._check_plain(trace, name)
        self.dict.delitem(trace, Constant(name))

    def describe(self) -> str:
        return f"module {self.value.__name__}"


@wrap_rule(types.ModuleType, subclasses=True)
def _wrap_module(trace: Trace, source: Source, obj: types.ModuleType) -> Value:
    trace.reader.guard(IdIs(source, obj))
    return PythonModule(trace, obj, source)


@wrap_rule(torch.dtype, torch.device, torch.layout, torch.memory_format, range, types.CodeType)
def _wrap_constant(trace: Trace, source: Source, obj: Any) -> Value:
    trace.reader.guard(ConstEquals(source, obj))
    return Constant(obj, source)


class Builtin(Constant):
    """A C function or descriptor, held by identity."""

    __slots__ = ()

    def getitem(self, trace: Trace, key: Value) -> Value:
        if type(self.value).__module__ == "typing" and key.is_constant():  # List[int]
            return trace.real_call(operator.getitem, self.value, key.as_constant())
        return super().getitem(trace, key)

    def getattr(self, trace: Trace, name: str) -> Value:
        wrapped = getattr(self.value, "__wrapped__", None)
        if name == "__wrapped__" and wrapped is not None:
            return trace.make(wrapped)
        found = trace.real(getattr, self.value, name)
        if (
            isinstance(found, types.BuiltinMethodType | types.MethodWrapperType)
            and found.__self__ is self.value
            or (type(self.value) not in _CHANGEABLE)
        ):
            return self.attribute(trace, found)
        return _attribute_again(trace, self, name)

    def call(self, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if not args and isinstance(self.value, types.MethodDescriptorType | types.WrapperDescriptorType):
            raise unsupported("unsupported-call", f"{self.describe()} is called without an object")
        return trace.call_builtin(self.value, args, kwargs)

    def describe(self) -> str:
        return f"builtin {getattr(self.value, '__qualname__', self.value)}"


_UNIONS: set[Any] = {types.UnionType, type(typing.Optional[int])}  # noqa: UP045  # one class since 3.14
wrap_held(
    Builtin,
    property,
    staticmethod,
    classmethod,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    functools.cached_property,
    type(functools.lru_cache(len)),
    torch.finfo,
    torch.iinfo,
    slice,
    types.GenericAlias,
    type(typing.List),  # noqa: UP006
    type(typing.List[int]),  # noqa: UP006
    *_UNIONS,
    type(typing.Any),
    type(typing.Optional),
    typing.TypeVar,
)


def _compared(name: str, trace: Trace, mine: Value, other: Value) -> Value:
    """`==` and `!=` of C functions and of their bound kin, as `__torch_function__` asks them: of held objects."""
    if issubclass(other.python_type(), type(None) | types.FunctionType | types.MethodType):
        return Constant(NotImplemented)
    if not all(_is_held_function(value) for value in (mine, other)):
        raise unsupported("unsupported-call", f"{mine.describe()} is compared with {other.describe()}")
    real = mine.as_constant()
    return trace.fresh(getattr(type(real), name)(real, other.as_constant()))


def _is_held_function(value: Value) -> bool:
    bound = isinstance(value, BoundBuiltin) and isinstance(value.instance, Builtin | ClassValue)
    return isinstance(value, Builtin) or bound


for _name in ("__eq__", "__ne__"):
    builtin_rule(getattr(types.BuiltinFunctionType, _name), getattr(types.MethodWrapperType, _name))(
        functools.partial(_compared, _name)
    )


# Descriptors and wrappers whose attributes a program may set; those of the other held objects are fixed.
_CHANGEABLE = frozenset(
    (property, staticmethod, classmethod, functools.cached_property, functools._lru_cache_wrapper)
)


def _attribute_again(trace: Trace, value: Constant, name: str) -> Value:
    """An attribute of a held object, read again at each call."""
    source = value.source if value.source is not None else Const(value.value, type(value.value).__name__)
    return trace.attribute_now(source, value.value, name)


@wrap_rule(types.BuiltinFunctionType, types.MethodWrapperType)
def _wrap_function(trace: Trace, source: Source, obj: Any) -> Value:
    """A C function is known by identity, a bound C method by its descriptor and its object: most
    objects make a new one at each read (`lock.__exit__` waits on the stack while a `with` block is cut).
    """
    descr = descriptor_of(obj)
    if descr is not None and find_rule(obj) is None:
        trace.reader.ask(source, obj, "its descriptor", descriptor_of)
        return BoundBuiltin(descr, trace.wrap(Attr(source, "__self__"), obj.__self__), source)
    descr = class_descriptor_of(obj)
    if descr is not None and find_rule(descr) is not None:
        trace.reader.ask(source, obj, "its descriptor", class_descriptor_of)
        return BoundClassBuiltin(descr, trace.wrap(Attr(source, "__self__"), obj.__self__), source)
    if getattr(obj.__self__, obj.__name__, obj) is obj:
        trace.reader.guard(IdIs(source, obj))
    else:  # a class method
        trace.reader.ask(source, obj, "equality", obj.__eq__)
    return Builtin(obj, source)


class EnumConstant(Constant):
    """An enum member: its attributes and its class's methods are guarded, but for enums of libraries."""

    __slots__ = ()

    @property
    def is_plain(self) -> bool:
        return trusted_class(type(self.value))

    @property
    def base(self) -> Value | None:
        return plain(self.value)

    def instance_attr(self, trace: Trace, name: str) -> Value | None:
        source = self.source if self.source is not None else Const(self.value, str(self.value))
        return checked(DictValue, trace.wrap(InstanceDict(source), self.value.__dict__)).lookup(name)


wrap_held(EnumConstant, enum.Enum, subclasses=True)


# super() ----------------------------------------------------------------------------------------------------
class SuperValue(Value):
    """`super(cls, instance)`: attributes are looked up on the MRO of the instance's type after `cls`."""

    __slots__ = ("cls", "instance", "owner")
    kind = super

    def __init__(self, cls: type, instance: Value) -> None:
        super().__init__()
        self.cls, self.instance = cls, instance
        real = instance.value if isinstance(instance, ClassValue) else None
        self.owner = real if real is not None and issubclass(real, cls) else instance.python_type()
        unsupported_if(
            cls not in self.owner.__mro__, "unsupported-call", "super() of an object of another class"
        )

    def getattr(self, trace: Trace, name: str) -> Value:
        if name == "__class__":
            return trace.make(super)
        mro = self.owner.__mro__
        for klass in mro[mro.index(self.cls) + 1 :]:
            if klass in trace.class_writes and name in trace.class_writes[klass].names:
                return trace.class_writes[klass].names[name].value
            if name in klass.__dict__:
                raw = klass.__dict__[name]
                break
            if not trusted_class(klass):
                trace.type_attr(klass, name)
        else:
            raise trace.error(AttributeError, f"'super' object has no attribute '{name}'")
        if not trusted_class(klass):
            trace.type_attr(klass, name)
        if self.owner is not self.instance.python_type():  # in a classmethod
            if type(raw) in _CLASS_METHODS:
                return _bind_to_class(trace, raw, name, self.instance)
            if type(raw) is types.FunctionType:
                return trace.type_attr_value(klass, name, raw)
            return ClassValue(klass)._bind(trace, raw, name)
        if type(raw) is types.FunctionType:
            return BoundMethod(trace.type_attr_value(klass, name, raw), self.instance)
        return trace.bind(raw, name, self.instance, klass)


# Binding ----------------------------------------------------------------------------------------------------
# Until 3.12 a classmethod asks the descriptor that it holds.
_PROBE: Any = classmethod
_ASKS_HELD = type(_PROBE(property(lambda cls: 1)).__get__(None, int)) is int
_CLASS_METHODS = (classmethod, types.ClassMethodDescriptorType)


def _bind_to_class(trace: Trace, raw: Any, name: str, owner: Value) -> Value:
    """The result of a `classmethod`: up to Python 3.12 the descriptor that it holds is asked, if it holds one. A
    C class method keeps its class only where a rule wants to see it.
    """
    if type(raw) is types.ClassMethodDescriptorType:
        if find_rule(raw) is not None:
            return BoundClassBuiltin(raw, owner)
        return trace.make(raw.__get__(None, owner.as_constant()))
    held = raw.__func__
    if type(held) is property and _ASKS_HELD:
        return _bind_property(trace, held, name, owner, type(owner))
    if _ASKS_HELD and type(held) is not types.FunctionType and hasattr(type(held), "__get__"):
        raise unsupported("unsupported-value", f"a class method over a {type(held).__name__}")
    return BoundMethod(trace.make(held), owner)


register_all(
    binders.register,
    (
        (
            (types.FunctionType,),
            lambda trace, raw, name, instance, cls: BoundMethod(
                trace.type_attr_value(cls, name, raw), instance
            ),
        ),
        ((staticmethod,), lambda trace, raw, name, instance, cls: trace.make(raw.__func__)),
        (
            _CLASS_METHODS,
            lambda trace, raw, name, instance, cls: _bind_to_class(
                trace, raw, name, trace.make(instance.python_type())
            ),
        ),
        (
            (types.MethodDescriptorType, types.WrapperDescriptorType),
            lambda trace, raw, name, instance, cls: BoundBuiltin(raw, instance),
        ),
        ((types.BuiltinFunctionType,), lambda trace, raw, name, instance, cls: trace.make(raw)),
        (
            (type(vars(namedtuple("_Pair", "a"))["a"]),),
            lambda trace, raw, name, instance, cls: instance.base.items[raw.__reduce__()[1][0]],
        ),
    ),
)


@binders.register(property, types.DynamicClassAttribute)
def _bind_property(trace: Trace, raw: Any, name: str, instance: Value, cls: type) -> Value:
    trace.raise_if(
        raw.fget is None, AttributeError, f"property '{name}' of '{cls.__name__}' object has no getter"
    )
    return trace.call(trace.make(raw.fget), [instance])


@binders.register(enum.property)
def _bind_enum_property(trace: Trace, raw: Any, name: str, instance: Value, cls: type) -> Value:
    unsupported_if(raw.fget is None, "unsupported-value", f"member {name!r} of a member of {cls.__name__}")
    return trace.call(trace.make(raw.fget), [instance])


def _constant_member(trace: Trace, instance: Constant, raw: Any, name: str) -> Value:
    """A C attribute of a known object: for good where the object cannot change or is a library's class."""
    fixed = (
        type(instance.value) in PURE_TYPES
        or isinstance(instance, ClassValue)
        and trusted_class(instance.value)
    )
    return trace.real_call(raw.__get__, instance.value) if fixed else _attribute_again(trace, instance, name)


@binders.register(types.MemberDescriptorType)
def _bind_member(trace: Trace, raw: Any, name: str, instance: Value, cls: type) -> Value:
    if isinstance(instance, UserObject):
        attrs = instance.dict(trace) if name == "__dict__" else None
        return attrs if attrs is not None else instance.load_slot(trace, raw)
    if isinstance(instance, Constant):
        return _constant_member(trace, instance, raw, name)
    raise unsupported("unsupported-value", f"attribute {name!r} of {instance.describe()}")


def _unpacks(obj: Any, name: str) -> bool:
    """Whether a read of an attribute runs the hooks of saved tensors: neither a trace nor a guard may do that."""
    return name.startswith(("saved_", "_saved_")) and isinstance(
        obj, compat.FunctionBase | torch.autograd.graph.Node
    )


@binders.register(types.GetSetDescriptorType)
def _bind_getset(trace: Trace, raw: Any, name: str, instance: Value, cls: type) -> Value:
    if name == "__class__":
        return trace.make(instance.python_type())
    if isinstance(instance, UserObject):
        if name == "__dict__":
            attrs = instance.dict(trace)
            if attrs is not None:
                return attrs
        if issubclass(instance.cls, BaseException) and instance.obj is MISSING:
            return instance.slots.get(name) or trace.make(() if name == "args" else None)
        if _unpacks(instance.obj, name):
            raise unsupported("autograd", f"{name!r} of a node of autograd is read: its hooks may count that")
        if instance.obj is not MISSING or instance.takes_over:
            return instance.load_slot(trace, raw)
    if isinstance(instance, Constant):
        return _constant_member(trace, instance, raw, name)
    if isinstance(instance, FunctionValue):
        return instance.getattr(trace, name)
    raise unsupported("unsupported-value", f"attribute {name!r} of {instance.describe()}")


@binders.register(functools.cached_property)
def _bind_cached(trace: Trace, raw: Any, name: str, instance: Value, cls: type) -> Value:
    value = trace.call(trace.make(raw.func), [instance])
    instance.store_attr(trace, raw.attrname, value)
    return value
