"""How instances come about: `cls(...)`, `__new__` and `__init__` of builtin bases, exceptions, and C
callables in general.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...base.narrowing import checked
from ...base.registry import register_all
from ..breaks import unsupported, unsupported_if
from .arguments import fitted
from .base import (
    MISSING,
    CallRule,
    ResultEmitter,
    Trace,
    Value,
    builtin_rule,
    call_finder,
    find_rule,
    refusing,
    run_rule,
    under_modes,
)
from .constant import PURE_TYPES, Constant, is_none
from .containers import DictValue, ListValue, SetValue, TupleValue, contents_of
from .context import on_device
from .function import FunctionValue
from .leaves import make_leaf, makes_leaf
from .operators import IN_C, like
from .user_object import UserObject

_NO_NAMES: Mapping[str, Value] = {}
_PLAIN_BASES = (int, float, str, bytes, complex)
_OWN_STATE = (OSError, ImportError, SyntaxError, UnicodeError, SystemExit, BaseExceptionGroup)


def instantiate(trace: Trace, cls: type, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """`type.__call__(cls, ...)`, through a metaclass's `__call__` if there is one."""
    meta_call = trace.type_attr(type(cls), "__call__")
    if isinstance(meta_call, type):  # typing.TypedDict: a call gives a plain dict
        return trace.call(trace.make(meta_call), args, kwargs)
    if isinstance(meta_call, types.FunctionType):
        if issubclass(cls, enum.Enum):
            return trace.real_call(cls, *[a.as_constant() for a in args])
        return trace.call(trace.bind(meta_call, "__call__", trace.make(cls), type(cls)), args, kwargs)
    trace.raise_if(
        getattr(cls, "__abstractmethods__", None),
        TypeError,
        f"Can't instantiate abstract class {cls.__name__}",
    )
    return type_call(trace, cls, args, kwargs)


def type_call(trace: Trace, cls: type, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """`__new__`, then `__init__` when `__new__` gave an instance."""
    maker = trace.type_attr(cls, "__new__")
    if isinstance(maker, staticmethod):
        maker = maker.__func__
    if isinstance(maker, types.FunctionType):
        instance = trace.call(trace.make(maker), [trace.make(cls), *args], kwargs)
        if not issubclass(instance.python_type(), cls):
            return instance
    else:
        instance = builtin_new(trace, cls, args, kwargs)
    init = trace.type_attr(cls, "__init__")
    if isinstance(init, types.FunctionType):
        trace.call(trace.bind(init, "__init__", instance, cls), args, kwargs)
    elif isinstance(instance, UserObject):
        builtin_init(trace, instance, init, args, kwargs, isinstance(maker, types.FunctionType))
    return instance


def _bare(cls: type) -> UserObject:
    """An empty instance, as `object.__new__` makes them of Python's classes alone."""
    in_c = [base for base in cls.__mro__[:-1] if base.__flags__ & IN_C]
    unsupported_if(bool(in_c), "unsupported-call", f"object.__new__ is asked for a {cls.__name__}")
    return UserObject(cls)


class _FunctionInstance(UserObject):
    """`F()` of a custom autograd function, of which only the static methods are of use."""

    __slots__ = ()

    def reconstruct(self, emitter: ResultEmitter) -> str:
        raise unsupported("reconstruct", f"{self.describe()} leaves the captured region")


class _Descriptor(_FunctionInstance):
    """An instance of a class derived from `property`, of which only the class is known: `Categorical.logits` is
    one, and distributions ask for its class.
    """

    __slots__ = ()

    def getattr(self, trace: Trace, name: str) -> Value:
        unsupported_if(name != "__class__", "unsupported-call", f"`{name}` of {self.describe()} is read")
        return trace.make(self.cls)


_EMPTY: dict[Any, Callable[[type], Value | None]] = {
    dict.__new__: lambda cls: DictValue([], kind=OrderedDict if issubclass(cls, OrderedDict) else dict),
    list.__new__: lambda cls: ListValue([]),
    set.__new__: lambda cls: SetValue({}, mirror=set()),
    types.SimpleNamespace.__new__: lambda cls: None,
}


def builtin_new(
    trace: Trace, cls: type, args: list[Value], kwargs: dict[str, Value], maker: Any = None
) -> Value:
    """A C `__new__` (default: that of the class): an empty instance with the content that the builtin base
    takes from the arguments."""
    unsupported_if(
        trace.type_attr(cls, "__del__") is not MISSING,
        "finalizer",
        f"an instance of {cls.__qualname__} is made",
        "its class has __del__, which runs when the last reference goes",
    )
    maker = maker or trace.type_attr(cls, "__new__")
    if maker is object.__new__:
        trace.raise_if(
            (args or kwargs) and trace.type_attr(cls, "__init__") is object.__init__,
            TypeError,
            f"{cls.__name__}() takes no arguments",
        )
        return _bare(cls)
    if issubclass(cls, BaseException):
        unsupported_if(
            issubclass(cls, _OWN_STATE),
            "unsupported-call",
            f"a {cls.__name__} is made",
            "its C code keeps more than `args`",
        )
        return new_exception(trace, cls, args)
    if issubclass(cls, torch.autograd.Function):
        return _FunctionInstance(cls)
    if maker is property.__new__ and cls is not property:
        return _Descriptor(cls)
    if maker in _EMPTY:
        return UserObject(cls, base=_EMPTY[maker](cls))
    if issubclass(cls, tuple) and maker is tuple.__new__:
        return UserObject(cls, base=TupleValue(args[0].listed(trace) if args else []))
    for base in _PLAIN_BASES:
        if issubclass(cls, base) and maker is base.__new__:
            return UserObject(cls, base=trace.call(trace.make(base), args, kwargs))
    if (rule := find_rule(maker, args)) is not None:
        return run_rule(trace, maker, rule, [trace.make(cls), *args], kwargs)
    raise unsupported(
        "unsupported-call",
        f"an instance of {cls.__module__}.{cls.__qualname__} is made",
        "its class is written in C and has no rule here",
    )


def builtin_init(
    trace: Trace, instance: UserObject, init: Any, args: list[Value], kwargs: dict[str, Value], made: bool
) -> None:
    """A C `__init__` of an object made in the trace."""
    base, space = instance.base, init is types.SimpleNamespace.__init__
    most = 0 if space else 1 + (init is defaultdict.__init__)
    if (space or isinstance(base, ListValue | DictValue | SetValue)) and len(args) > most:
        raise unsupported("unsupported-call", f"{instance.cls.__name__}() with {len(args)} arguments")
    if isinstance(base, ListValue) and init is list.__init__:
        base.mutate(trace)[:] = args[0].listed(trace) if args else []
    elif isinstance(base, DictValue) and init in (dict.__init__, OrderedDict.__init__, defaultdict.__init__):
        if init is defaultdict.__init__:
            factory, *args = args or [Constant(None)]
            trace.raise_if(
                not is_none(factory) and not trace.has_special(factory, "__call__"),
                TypeError,
                "first argument must be callable or None",
            )
            instance.slots["default_factory"] = factory
        trace.update_dict(base, *args, named=kwargs)
    elif isinstance(base, SetValue) and init is set.__init__:
        if args:
            base.change(trace, "update", args[0])
    elif space:
        for name, value in kwargs.items():
            instance.store_attr(trace, name, value)
    elif issubclass(instance.cls, BaseException):
        _set_args(instance, args)
        unsupported_if(kwargs, "unsupported-call", f"{instance.cls.__name__}() with keyword arguments")
    elif (
        init is object.__init__
        and (args or kwargs)
        and not made
        and trace.type_attr(instance.cls, "__new__") is object.__new__
    ):
        raise trace.error(TypeError, f"{instance.cls.__name__}() takes no arguments")


def new_exception(trace: Trace, cls: type[BaseException], args: list[Value]) -> UserObject:
    """An exception instance made as C code makes it."""
    instance = UserObject(cls)
    _set_args(instance, args)
    return instance


def _set_args(instance: UserObject, args: list[Value]) -> None:
    """The arguments that the C `__init__` of exceptions keeps."""
    instance.slots["args"] = TupleValue(args)
    if issubclass(instance.cls, StopIteration):
        instance.slots["value"] = args[0] if args else Constant(None)


def link_context(trace: Trace, error: Value) -> None:
    """Note on an exception that is raised now the one that is being handled, as CPython does; the chain stays
    without loops.
    """
    handled = trace.exception()
    if handled is None or handled is error:
        return
    at: Any = handled
    while isinstance(at, UserObject) and at.obj is MISSING:
        after = at.slots.get("__context__")
        if after is error:
            at.slots["__context__"] = None
        at = after
    error.setattr(trace, "__context__", handled)


_COMPARISONS = frozenset({"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"})


def call_builtin(trace: Trace, fn: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Call a C function or unbound C method: its rule, or for real when it is pure and all is known."""
    trace.tail = False  # a rule goes on with the result of its call
    found = under_modes(trace, fn, args, kwargs) if trace.calls.modes else None
    if found is not None:
        return found
    kwargs = on_device(trace, fn, kwargs)
    if kwargs and makes_leaf(fn, kwargs):
        return make_leaf(trace, fn, args, kwargs)
    _check_receiver(trace, fn, args)
    rule = find_rule(fn, args)
    if rule is not None:
        return run_rule(trace, fn, rule, *fitted(fn, args, kwargs))
    constant = all(a.is_constant() for a in args) and all(v.is_constant() for v in kwargs.values())
    if constant and is_pure(fn):
        given = [a.as_constant() for a in args], {k: v.as_constant() for k, v in kwargs.items()}
        found = trace.real(fn, *given[0], **given[1])
        parts = (
            found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else ()
        )
        copied = not all(isinstance(a, Constant) for a in args) and any(
            isinstance(p, _HOLDERS) for p in parts
        )
        unsupported_if(copied, "unsupported-call", f"{fn.__name__} hands on the contents of its arguments")
        return trace.fresh(found)
    if is_pure(fn):  # of a subclass of int, str, ... it looks at the plain content
        plain = [a.base if isinstance(a, UserObject) and isinstance(a.base, Constant) else a for a in args]
        if any(p is not a for p, a in zip(plain, args)):
            known = all(p.is_constant() for p in plain) and not kwargs and find_rule(fn, plain) is None
            return call_with_twins(trace, fn, args) if known else call_builtin(trace, fn, plain, kwargs)
        signature = (
            getattr(fn, "__text_signature__", "") if isinstance(fn, types.WrapperDescriptorType) else ""
        )
        of_two = "value" in (signature or "")
        if (
            of_two
            and len(args) == 2
            and (fn.__name__ in _COMPARISONS or fn.__objclass__ not in (str, bytes, tuple))
        ):
            return Constant(NotImplemented)  # a sequence's `+` and `*` raise
    name = getattr(fn, "__qualname__", None) or repr(fn)
    if "pybind11" in name:
        name = fn.__name__
    module = getattr(fn, "__module__", None) or getattr(getattr(fn, "__objclass__", None), "__module__", "")
    raise unsupported(
        "unsupported-call",
        f"{module + '.' if module else ''}{name} is called",
        "it is written in C and has no rule here",
        "call it outside the compiled function",
    )


_OF_INSTANCES = frozenset((types.MethodDescriptorType, types.WrapperDescriptorType))


def _check_receiver(trace: Trace, fn: Any, args: list[Value]) -> None:
    """A method of a builtin class that is found on the class takes instances of that class alone."""
    if not args or type(fn) not in _OF_INSTANCES:
        return
    owner, cls = fn.__objclass__, args[0].python_type()
    if owner.__module__ not in ("builtins", "collections") or issubclass(cls, owner):
        return
    trace.real(fn, like(cls))


def call_with_twins(trace: Trace, fn: Callable[..., Any], args: list[Value]) -> Value:
    """A pure C function of instances of subclasses of int, str, ...: the objects it hands back (`text % ()`,
    `text.partition("-")[0]`) is the instance, anything else that it gives is a plain object.
    """
    twins = [_twin(a) if isinstance(a, UserObject) else a.as_constant() for a in args]
    given = {id(t): a for t, a in zip(twins, args) if isinstance(a, UserObject)}
    found = trace.real(fn, *twins)
    if type(found) is tuple and any(id(part) in given for part in found):
        return trace.make_tuple([given.get(id(part)) or trace.fresh(part) for part in found])
    return given.get(id(found)) or trace.fresh(found)


def _twin(value: UserObject) -> Any:
    """A real instance of a bare subclass with the same content."""
    held = checked(Constant, value.base).value
    return type(value.cls.__name__, (type(held),), {})(held)


_HOLDERS = (list, tuple, dict, set, frozenset)  # of objects that a program may tell from their copies
_PURE_MODULES = frozenset({"math", "cmath", "_operator", "_struct", "_bisect", "unicodedata"})
_WRITING = frozenset({"insort", "insort_left", "insort_right", "delitem", "setitem", "iconcat", "pack_into"})
pure_functions: set[Any] = set()


def is_pure(fn: Callable[..., Any]) -> bool:
    """Whether a C callable may run on real objects at trace time: no side effect, no state."""
    if isinstance(fn, types.MethodDescriptorType | types.WrapperDescriptorType | types.GetSetDescriptorType):
        return fn.__objclass__ in PURE_TYPES
    if isinstance(fn, types.BuiltinFunctionType):
        owner = fn.__self__
        if isinstance(owner, types.ModuleType):
            return owner.__name__ in _PURE_MODULES and fn.__name__ not in _WRITING or fn in pure_functions
        return isinstance(owner, type) and owner in PURE_TYPES or type(owner) in PURE_TYPES
    try:
        return fn in pure_functions
    except TypeError:
        return False


def update_dict(trace: Trace, into: Value, *sources: Value, named: Mapping[str, Value] = _NO_NAMES) -> None:
    """`dict.update(into, source, **named)`."""
    target = contents_of(into)
    assert isinstance(target, DictValue)
    for source in sources:
        _update_dict(trace, target, source)
    for name, value in named.items():
        target.store(trace, name, Constant(name), value)


def _update_dict(trace: Trace, target: DictValue, source: Value) -> None:
    """From a dict, a mapping with `keys`, or pairs."""
    plain = source if isinstance(source, DictValue) else contents_of(source)
    if isinstance(plain, DictValue) and _is_read_raw(trace, source, target.kind):
        target.update(trace, plain)
    elif trace.getattr_or_none(source, "keys") is not None:
        for key in trace.call_method(source, "keys", []).unpack(trace):
            target.store(trace, key.hash_key(trace), key, source.getitem(trace, key))
    else:
        for i, pair in enumerate(source.each(trace)):
            parts = pair.unpack(trace)
            if len(parts) != 2:
                raise trace.error(
                    ValueError,
                    f"dictionary update sequence element #{i} has length {len(parts)}; 2 is required",
                )
            key, value = parts
            target.store(trace, key.hash_key(trace), key, value)


def _is_read_raw(trace: Trace, source: Value, into: type) -> bool:
    """Whether CPython reads a dict's memory, whatever its class overrides, or nothing is overridden. An
    OrderedDict asks every subclass for its keys, a dict those with an `__iter__` of their own.
    """
    cls = source.python_type()
    if into is not OrderedDict and trace.type_attr(cls, "__iter__") is dict.__iter__:
        return True
    return not any(
        isinstance(trace.type_attr(cls, n), types.FunctionType) for n in ("keys", "__getitem__", "__iter__")
    )


def inline_function(
    trace: Trace, fn: Callable[..., Any], args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """Interpret a real Python function even if it has a call rule."""
    value = trace.make(fn)
    assert isinstance(value, FunctionValue)
    return trace.inline(value, args, kwargs)


def make_tuple(trace: Trace, items: list[Value]) -> TupleValue:
    """A tuple of values."""
    return TupleValue(items)


# object -----------------------------------------------------------------------------------------------------
register_all(
    builtin_rule,
    (
        ((object.__new__,), lambda trace, cls, /, *args, **kwargs: _bare(cls.as_constant())),
        ((object.__init__,), lambda trace, /, *args, **kwargs: Constant(None)),
        ((object.__init_subclass__,), lambda trace, /, *args, **kwargs: Constant(None)),
        (
            (object.__getattribute__,),
            lambda trace, obj, name: trace.object_getattr(obj, obj.python_type(), name.as_constant()),
        ),
        (
            (object.__setattr__, object.__delattr__),
            lambda trace, obj, name, *value: (
                trace.object_setattr(obj, obj.python_type(), name.as_constant(), *value) or Constant(None)
            ),
        ),
        (
            (object.__eq__,),
            lambda trace, one, other: Constant(True if trace.same(one, other) else NotImplemented),
        ),
        (
            (type.__call__,),
            lambda trace, cls, /, *args, **kwargs: type_call(trace, cls.as_constant(), [*args], kwargs),
        ),
    ),
)


@builtin_rule(object.__ne__)
def _object_ne(trace: Trace, one: Value, other: Value) -> Value:
    equal = Value.binary(one, trace, operator.eq, other)
    return Constant(NotImplemented) if equal is None else Constant(not trace.truth(equal))


builtin_rule(object.__hash__)(
    refusing(
        "unsupported-call", "the hash of an object is its address", cure="do not compute with id() or hash()"
    )
)


def _new(base: type, trace: Trace, cls: Value, /, *args: Value, **kwargs: Value) -> Value:
    kind = cls.as_constant()
    if kind is base:
        return trace.call(trace.make(base), [*args], kwargs)
    return builtin_new(trace, kind, [*args], kwargs, base.__new__)


for _base in (dict, list, tuple, set, int, float, str, bytes):
    builtin_rule(_base.__new__)(functools.partial(_new, _base))


def _init(base: Any, trace: Trace, obj: Value, /, *args: Value, **kwargs: Value) -> Value:
    if isinstance(obj, UserObject) and obj.obj is MISSING:
        builtin_init(trace, obj, base.__init__, [*args], kwargs, True)
        return Constant(None)
    raise unsupported("unsupported-call", f"{base.__name__}.__init__ of an existing object")


for _made in (dict, list, set, property, OrderedDict, defaultdict):
    builtin_rule(_made.__init__)(functools.partial(_init, _made))


def _init_exception(trace: Trace, error: Value, /, *args: Value, **kwargs: Value) -> Value:
    if not isinstance(error, UserObject) or error.obj is not MISSING or kwargs:
        raise unsupported("unsupported-call", "an exception's __init__ is called again")
    _set_args(error, [*args])
    return Constant(None)


@call_finder
def _of_exceptions(fn: Any) -> CallRule | None:
    """`BaseException.__init__` and `__new__`, and their copies on every builtin exception class."""
    is_init = isinstance(fn, types.WrapperDescriptorType) and fn.__name__ == "__init__"
    is_new = isinstance(fn, types.BuiltinFunctionType) and fn.__name__ == "__new__"
    owner = fn.__objclass__ if is_init else fn.__self__ if is_new else None
    if not (isinstance(owner, type) and issubclass(owner, BaseException)):
        return None
    return _init_exception if is_init else _new_exception


def _new_exception(trace: Trace, cls: Value, /, *args: Value, **kwargs: Value) -> Value:
    return builtin_new(trace, cls.as_constant(), [*args], kwargs)
