"""Call rules of Python's builtin functions and types.

>>> @builtin_rule(len)
... def _len(trace, obj): return obj.length(trace)
"""

from __future__ import annotations

import abc
import builtins
import functools
import locale
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import _C
from ..base.registry import register_all
from .breaks import unsupported, unsupported_if
from .interpreter import GeneratorValue
from .polyfills import itertools as polyfills
from .protocol import trusted_class
from .source import Const, Source
from .values.base import (
    MISSING,
    Args,
    CallRule,
    Iterator,
    Kwargs,
    ObjectIterator,
    StandIn,
    Trace,
    Value,
    builtin_rule,
    call_finder,
    refusing,
)
from .values.constant import EMPTY, FALSE, PURE_TYPES, ZERO, Constant, RealIterator, is_none, present
from .values.containers import (
    DictValue,
    DictView,
    ListValue,
    SequenceValue,
    SetValue,
    TupleValue,
    contents_of,
    items_in_any_order,
)
from .values.function import BoundMethod
from .values.identity import Identity
from .values.instances import pure_functions
from .values.iterators import (
    EnumerateIterator,
    FilterIterator,
    MapIterator,
    ZipIterator,
)
from .values.klass import ClassValue, SuperValue
from .values.lazy_text import late_format, late_percent, late_str_format
from .values.operators import c_name
from .values.picked import pick
from .values.slices import make_slice
from .values.string import format_percent, formatted, shown, text_of
from .values.tensor import TensorValue
from .values.torch_function import HeldNumber
from .values.user_object import UserObject
from .values.walks import DictIterator, ReversedIterator, SequenceIterator

pure_functions.update(
    {abs, divmod, round, pow, chr, ord, bin, hex, oct, ascii, operator.index, sorted, min, max, sum, any, all}
)


def constants(args: Iterable[Value]) -> list[Any]:
    """The real objects of values that are all constant."""
    return [a.as_constant() for a in args]


def all_constant(args: Iterable[Value], kwargs: Kwargs | None = None) -> bool:
    """Whether every argument is constant."""
    return all(a.is_constant() for a in args) and all(v.is_constant() for v in (kwargs or {}).values())


_TYPE_INSTANCE, _TYPE_SUBCLASS = type.__dict__["__instancecheck__"], type.__dict__["__subclasscheck__"]

register_all(
    builtin_rule,
    (
        (
            (isinstance,),
            lambda trace, obj, kinds: Constant(
                any(_is_instance(trace, obj, kind) for kind in _kinds(trace, kinds))
            ),
        ),
        (
            (issubclass,),
            lambda trace, cls, kinds: Constant(
                any(_is_subclass(trace, cls, kind) for kind in _kinds(trace, kinds))
            ),
        ),
        (
            (_TYPE_SUBCLASS,),
            lambda trace, kind, cls: Constant(trace.derives(cls.as_constant(), kind.as_constant())),
        ),
        (
            (hasattr,),
            lambda trace, obj, name: Constant(trace.getattr_or_none(obj, _name(name)) is not None),
        ),
        (
            (setattr,),
            lambda trace, obj, name, value: obj.setattr(trace, _name(name), value) or Constant(None),
        ),
        (
            (delattr,),
            lambda trace, obj, name: obj.delattr(trace, _name(name)) or Constant(None),
        ),
        ((any,), lambda trace, items: Constant(any(map(trace.truth, _items(trace, items))))),
        ((all,), lambda trace, items: Constant(all(map(trace.truth, _items(trace, items))))),
        ((list,), lambda trace, items=None: ListValue([] if items is None else items.listed(trace))),
        ((set,), lambda trace, items=None: SetValue.of(trace, [] if items is None else items)),
        (
            (frozenset,),
            lambda trace, items=None: (
                items
                if items is not None and items.python_type() is frozenset
                else SetValue.of(trace, [] if items is None else items, frozenset)
            ),
        ),
        ((bool,), lambda trace, value=None: Constant(False) if value is None else _bool(trace, value)),
        ((len,), lambda trace, obj: obj.length(trace)),
        (
            (iter,),
            lambda trace, obj, *sentinel: (
                trace.call_python(polyfills.iter_until, [obj, *sentinel]) if sentinel else obj.iterate(trace)
            ),
        ),
        (
            (types.FunctionType.__get__,),
            lambda trace, func, obj, *cls: func if is_none(obj) else BoundMethod(func, obj),
        ),
        ((repr,), lambda trace, obj: text_of(trace, obj, repr)),
        (
            (str.join,),
            lambda trace, text, parts: trace.real_call(
                text.as_constant().join,
                constants(_items(trace, parts, "can only join an iterable")),
            ),
        ),
        ((filter,), lambda trace, fn, items: FilterIterator(fn, items.iterate(trace))),
        ((types.MethodType,), lambda trace, fn, obj: BoundMethod(fn, obj)),
        (
            (types.GeneratorType.send,),
            lambda trace, generator, value: _generator_result(
                trace, _generator(generator).send(trace, value)
            ),
        ),
        (
            (builtins.__import__,),
            lambda trace, /, *args, **kwargs: trace.real_call(
                __import__, *constants(args), **{k: v.as_constant() for k, v in kwargs.items()}
            ),
        ),
    ),
)


def _kinds(trace: Trace, kinds: Value) -> list[Value]:
    """The classes that are meant, in the order in which they are asked."""
    if kinds.python_type() is tuple:
        return [kind for part in kinds.unpack(trace) for kind in _kinds(trace, part)]
    kind = kinds.as_constant() if kinds.is_constant() else None
    a_class = isinstance(kind, type | types.UnionType) or trace.has_special(kinds, "__instancecheck__")
    unsupported_if(not a_class, "unsupported-call", f"{kinds.describe()} is asked for as a class")
    return [trace.make(k) for k in kind.__args__] if isinstance(kind, types.UnionType) else [kinds]


def _bool(trace: Trace, value: Value) -> Value:
    """The answer of a tensor of data is handed on, and read where it is needed."""
    if type(value) is TensorValue and trace.sizes.takes_data:
        return trace.call_special(value, "__bool__", [], {})
    return value if type(value) is HeldNumber and value.kind is bool else Constant(trace.truth(value))


def _is_instance(trace: Trace, value: Value, kinds: Value) -> bool:
    cls, kind = value.python_type(), kinds.as_constant()
    if cls is kind:
        return True
    hook = trace.type_attr(type(kind), "__instancecheck__")
    if hook is _TYPE_INSTANCE:
        return trace.derives(cls, kind) or _claims(trace, value, cls, kind)
    if isinstance(hook, types.FunctionType) and hook.__module__ not in _ASKED_HOOKS:
        return trace.truth(trace.call(trace.make(hook), [kinds, value]))
    real = value.real()
    if real is MISSING:
        return _made_is_instance(trace, value, cls, kind)
    if trusted_class(cls) and _is_trusted(kind) and not isinstance(value, TensorValue):
        return trace.real_call(isinstance, real, kind).as_constant()
    unsupported_if(
        getattr(kind, "_is_protocol", False) and trace.effects.changes_objects,
        "unsupported-call",
        f"isinstance() asks the protocol {kind.__name__} after objects were changed",
    )
    if hook is abc.ABCMeta.__instancecheck__ and _shows_its_class(trace, cls):
        return _is_subclass(trace, trace.make(cls), trace.make(kind))  # one question for all instances
    if value.source is not None:
        return _ask(trace, value.source, real, f"being a {kind!r}", lambda now: isinstance(now, kind))
    return _ask(
        trace, Const(kind, str(kind)), kind, f"having {real!r:.60}", lambda now: isinstance(real, now)
    )


def _ask(trace: Trace, source: Source | None, obj: Any, text: str, question: Any) -> bool:
    return trace.real(trace.reader.ask, source, obj, text, question)


def _is_trusted(kind: Any) -> bool:
    """Whether a class, or an alias of one, is taken as constant."""
    return trusted_class(kind) if isinstance(kind, type) else type(kind).__module__ == "typing"


def _made_is_instance(trace: Trace, value: Value, cls: type, kind: Any) -> bool:
    """Of an object made in the trace only the class is known."""
    unsupported_if(
        getattr(kind, "_is_protocol", False) and isinstance(value, UserObject),
        "unsupported-call",
        f"isinstance() asks the protocol {kind.__name__} about an object made here",
    )
    if isinstance(value, TensorValue):
        return isinstance(value.example, kind)
    return _is_subclass(trace, trace.make(cls), trace.make(kind))


def _claims(trace: Trace, value: Value, cls: type, kind: Any) -> bool:
    """Whether the object's `__class__` says what its type does not."""
    if not isinstance(value, UserObject) or _shows_its_class(trace, cls):
        return False
    claimed = value.getattr(trace, "__class__").as_constant()
    return claimed is not cls and isinstance(claimed, type) and trace.derives(claimed, kind)


def _shows_its_class(trace: Trace, cls: type) -> bool:
    """Whether `__class__` of an instance is its type."""
    return trace.type_attr(cls, "__class__") is object.__dict__["__class__"] and _C.is_plain_access(
        trace.type_attr(cls, "__getattribute__")
    )


def _is_subclass(trace: Trace, value: Value, kinds: Value) -> bool:
    cls, kind = value.as_constant(), kinds.as_constant()
    hook = trace.type_attr(type(kind), "__subclasscheck__")
    if hook is _TYPE_SUBCLASS and isinstance(cls, type):
        return trace.derives(cls, kind)
    if isinstance(hook, types.FunctionType) and hook.__module__ not in _ASKED_HOOKS:
        return trace.truth(trace.call(trace.make(hook), [kinds, value]))
    if isinstance(cls, type) and trusted_class(cls) and _is_trusted(kind):
        return trace.real_call(issubclass, cls, kind).as_constant()
    return _ask(
        trace, Const(kind, str(kind)), kind, f"having the subclass {cls!r}", lambda now: issubclass(cls, now)
    )


_ASKED_HOOKS = frozenset(("abc", "typing", "enum"))  # these are asked as a whole, under a guard


@builtin_rule(_TYPE_INSTANCE)
def _type_instancecheck(trace: Trace, kind: Value, obj: Value) -> Value:
    cls, kind = obj.python_type(), kind.as_constant()
    return Constant(trace.derives(cls, kind) or _claims(trace, obj, cls, kind))


@builtin_rule(type)
def _type(trace: Trace, obj: Value, *more: Value) -> Value:
    unsupported_if(
        more,
        "unsupported-call",
        "a class is made by type()",
        cure="define the class outside the compiled function",
    )
    return trace.make(obj.python_type())


def _name(value: Value) -> str:
    """The name of an attribute; anything but a text has an error of its own."""
    unsupported_if(
        value.python_type() is not str, "unsupported-call", f"an attribute is named by {value.describe()}"
    )
    return value.as_constant()


@builtin_rule(getattr)
def _getattr(trace: Trace, obj: Value, name: Value, default: Value | None = None) -> Value:
    if default is None:
        return obj.getattr(trace, _name(name))
    found = trace.getattr_or_none(obj, _name(name))
    return default if found is None else found


@builtin_rule(callable)
def _callable(trace: Trace, obj: Value) -> Value:
    if isinstance(obj, Constant) and not obj.symbolic and type(obj) is not HeldNumber:
        return Constant(callable(obj.value))
    return Constant(trace.has_special(obj, "__call__"))


@builtin_rule(id)
def _id(trace: Trace, obj: Value) -> Value:
    real = obj.real()
    if real is not MISSING and obj.source is not None and obj.source.is_held:
        trace.reader.guard_identity(obj.source, real)
        return Constant(id(real))
    unsupported_if(
        isinstance(obj, Constant | BoundMethod),
        "unsupported-call",
        f"id() of {obj.describe()}",
        "the number changes from run to run",
    )
    return Identity(obj)


@builtin_rule(hash)
def _hash(trace: Trace, obj: Value) -> Value:
    if obj.is_constant() and type(obj.as_constant()) in PURE_TYPES:
        return trace.real_call(hash, obj.as_constant())
    if isinstance(trace.type_attr(obj.python_type(), "__hash__"), types.FunctionType):
        return trace.call_special(obj, "__hash__", [], {})
    raise unsupported("unsupported-call", f"hash() of {obj.describe()}")


@builtin_rule(vars)
def _vars(trace: Trace, obj: Value | None = None) -> Value:
    if obj is None:
        return trace.call(trace.make(locals), [])
    found = trace.getattr_or_none(obj, "__dict__")
    if found is None:
        raise trace.error(TypeError, "vars() argument must have __dict__ attribute")
    return found


builtin_rule(print)(refusing("side-effect", "print() is called", cure="print outside the compiled function"))
builtin_rule(
    input, open, breakpoint, exec, eval, compile, memoryview, bytearray,
    sys.getrecursionlimit,  # the capture raises it
    warnings.catch_warnings.__enter__, warnings.catch_warnings.__exit__,  # warnings wait for the end of a graph
)(
    refusing(
        "unsupported-call",
        "a builtin that depends on the frame or the outside world is called",
        cure="call it outside the compiled function",
    )
)  # fmt: skip


@builtin_rule(super)
def _super(trace: Trace, cls: Value | None = None, obj: Value | None = None) -> Value:
    if cls is not None:
        if obj is None:
            raise unsupported("unsupported-call", "super() of a class alone, which is bound later")
        return SuperValue(cls.as_constant(), obj)
    frame = trace.stack.frames[-1]
    index = frame.info.localsplus.index("__class__")
    cell, first = frame.fast[index], frame.fast[0]
    if frame.info.localsplus[0] in frame.info.code.co_cellvars:  # an inner function captures self
        first = first.load(trace)
    unsupported_if(first is None, "unsupported-call", "super() where the first argument has been deleted")
    return SuperValue(cell.load(trace).as_constant(), first)


# Conversions ------------------------------------------------------------------------------------------------
@builtin_rule(tuple)
def _tuple(trace: Trace, items: Value | None = None) -> Value:
    if isinstance(items, Constant | TupleValue) and items.python_type() is tuple:
        return items
    return TupleValue([] if items is None else items.listed(trace))


@builtin_rule(dict)
def _dict(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    result = DictValue([])
    trace.update_dict(result, *args, named=kwargs)
    return result


def _number(kind: type, special: tuple[str, ...], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    if all_constant(args, kwargs) and not any(isinstance(arg, ClassValue) for arg in args):
        return trace.real_call(kind, *constants(args), **{k: v.as_constant() for k, v in kwargs.items()})
    unsupported_if(len(args) != 1 or kwargs, "unsupported-call", f"{kind.__name__}() of several objects")
    for name in special:
        if trace.has_special(args[0], name):
            found = trace.call_special(args[0], name, [], {})
            if isinstance(found, Constant) and (name == "__index__" or kind is complex):
                return trace.real_call(kind, found.value)
            return found
    inner = contents_of(args[0])
    if isinstance(inner, Constant):
        return trace.real_call(kind, inner.value)
    raise unsupported("unsupported-call", f"{kind.__name__}() of {args[0].describe()}")


builtin_rule(int)(functools.partial(_number, int, ("__int__", "__index__", "__trunc__")))
builtin_rule(float)(functools.partial(_number, float, ("__float__", "__index__")))
builtin_rule(complex)(functools.partial(_number, complex, ("__complex__", "__float__")))
builtin_rule(bytes)(functools.partial(_number, bytes, ("__bytes__",)))


@builtin_rule(str)
def _str(trace: Trace, *args: Value, **kwargs: Value) -> Value:
    if len(args) != 1 or kwargs:
        return trace.real_call(str, *constants(args), **{k: v.as_constant() for k, v in kwargs.items()})
    return text_of(trace, args[0], str)


@builtin_rule(format)
def _format(trace: Trace, value: Value, format_spec: Value = EMPTY) -> Value:
    spec = format_spec.as_constant()
    waiting = late_format(trace, value, spec) if isinstance(spec, str) else None
    if waiting is not None:
        return waiting
    if isinstance(value, Constant) and value.is_plain:
        _ask_locale(trace, isinstance(spec, str) and spec.endswith("n"))
        return trace.real_call(format, value.value, spec)
    raw = trace.type_attr(value.python_type(), "__format__")
    if isinstance(raw, types.FunctionType):
        return trace.call_special(value, "__format__", [Constant(spec)], {})
    if isinstance(value, UserObject) and isinstance(value.base, Constant):
        return trace.real_call(format, value.base.value, spec) if spec else text_of(trace, value, str)
    if spec and raw is object.__format__:
        raise trace.error(
            TypeError, f"unsupported format string passed to {c_name(value.python_type())}.__format__"
        )
    return trace.real_call(format, text_of(trace, value, str).as_constant(), spec)


def _ask_locale(trace: Trace, format_asks: bool) -> None:
    """Guard the locale where the format `n` may write a number as is usual there."""
    if format_asks:
        source = Const(locale.localeconv, "locale.localeconv")
        trace.reader.ask(source, locale.localeconv, "the locale", lambda now: str(now()))


@builtin_rule(str.format)
def _str_format(trace: Trace, template: Value, /, *args: Value, **kwargs: Value) -> Value:
    text = (getattr(template, "base", None) or template).as_constant()
    if "{" not in text and "}" not in text:
        return template
    waiting = late_str_format(trace, text, args, kwargs)
    if waiting is not None:
        return waiting
    _ask_locale(trace, "n}" in text)
    if all_constant(args, kwargs):
        return trace.real_call(
            text.format, *constants(args), **{k: v.as_constant() for k, v in kwargs.items()}
        )
    words = {name: shown(trace, value) for name, value in kwargs.items()}
    return formatted(trace, text.format, *[shown(trace, value) for value in args], **words)


@builtin_rule(str.__mod__)
def _str_mod(trace: Trace, template: Value, value: Value) -> Value:
    """`template % value` with an instance of a subclass of str on a side: Python asks its methods."""
    text = getattr(template, "base", None) or template
    if not isinstance(text, Constant) or text.python_type() is not str:
        return Constant(NotImplemented)
    found = late_percent(trace, text, value) or format_percent(trace, text, value)
    return found if "%" in text.value else template


builtin_rule(vars(str)["__rmod__"])(lambda trace, value, template: _str_mod(trace, template, value))


@builtin_rule(slice)
def _slice(trace: Trace, *args: Value) -> Value:
    if not 1 <= len(args) <= 3:
        return trace.real_call(slice, *args)  # raises
    return make_slice([Constant(None), *args] if len(args) == 1 else [*args])


# Iteration --------------------------------------------------------------------------------------------------
@builtin_rule(next)
def _next(trace: Trace, obj: Value, default: Value | None = None) -> Value:
    iterator = obj if isinstance(obj, Iterator) else ObjectIterator(obj)
    if not isinstance(obj, Iterator) and not trace.has_special(obj, "__next__"):
        raise trace.error(TypeError, f"'{c_name(obj.python_type())}' object is not an iterator")
    if isinstance(iterator, GeneratorValue):
        yielded, item = iterator.send(trace, Constant(None))
        return _generator_result(trace, (yielded, item)) if yielded or default is None else default
    found = iterator.next(trace)
    if found is not None:
        return found
    if default is not None:
        return default
    raise trace.error(StopIteration)


def _step(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    unsupported_if(
        len(args) != 1 or kwargs or not isinstance(args[0], Iterator),
        "unsupported-call",
        f"{fn.__qualname__} is called",
    )
    return _next(trace, args[0])


@call_finder
def _find_step(fn: Callable[..., Any]) -> CallRule | None:
    """`__next__` of a C iterator, called by its name."""
    is_step = isinstance(fn, types.WrapperDescriptorType) and fn.__name__ == "__next__"
    return functools.partial(_step, fn) if is_step else None


@builtin_rule(range)
def _range(trace: Trace, *args: Value) -> Value:
    real = []
    for a in args:
        real.append(
            a.as_constant() if a.is_constant() else trace.call_special(a, "__index__", [], {}).as_constant()
        )
    return trace.real_call(range, *real)


@builtin_rule(enumerate)
def _enumerate(trace: Trace, iterable: Value, start: Value = ZERO) -> Value:
    unsupported_if(
        start.python_type() is not int,
        "unsupported-call",
        "enumerate() counts from something other than an int",
    )
    return EnumerateIterator(iterable.iterate(trace), start)


@builtin_rule(map)
def _map(trace: Trace, fn: Value, *iterables: Value, strict: Value = FALSE) -> Value:
    is_strict = trace.truth(strict)
    return MapIterator(fn, *[a.iterate(trace) for a in iterables], strict=is_strict)


@builtin_rule(zip)
def _zip(trace: Trace, *iterables: Value, strict: Value = FALSE) -> Value:
    is_strict = trace.truth(strict)
    return ZipIterator(*[a.iterate(trace) for a in iterables], strict=is_strict)


@builtin_rule(reversed)
def _reversed(trace: Trace, value: Value) -> Value:
    contents = contents_of(value)
    special = trace.type_attr(value.python_type(), "__reversed__")
    if isinstance(special, types.FunctionType):
        return trace.call_special(value, "__reversed__", [], {})
    if special is None:
        raise trace.error(TypeError, f"'{c_name(value.python_type())}' object is not reversible")
    if isinstance(contents, DictValue):
        return DictIterator(contents, "keys", reverse=True)
    if isinstance(value, DictView):
        return DictIterator(value.target, value.part, reverse=True)
    if isinstance(contents, SequenceValue):
        return ReversedIterator(contents)
    if isinstance(value, Constant) and value.is_plain:
        return RealIterator(trace.real(reversed, value.value))
    if not trace.has_special(value, "__len__") or not trace.has_special(value, "__getitem__"):
        return trace.call_special(value, "__reversed__", [], {})
    length = value.length(trace).as_constant()
    unsupported_if(
        getattr(value, "base", None) is not None
        and isinstance(trace.type_attr(value.python_type(), "__len__"), types.FunctionType),
        "unsupported-call",
        f"reversed() of {value.describe()}",
    )
    return SequenceIterator(
        TupleValue([value.getitem(trace, Constant(i)) for i in range(length - 1, -1, -1)])
    )


@builtin_rule(sum)
def _sum(trace: Trace, items: Value, start: Value = ZERO) -> Value:
    total = start
    unsupported_if(issubclass(total.python_type(), str | bytes), "unsupported-call", "sum() of texts")
    for item in items.each(trace):
        total = trace.binary(operator.add, total, item)
    return total


def _items(trace: Trace, value: Value, refusal: str = "'{}' object is not iterable") -> Iterable[Value]:
    """The items of an iterable, one step after the other."""
    trace.must_iterate(value, refusal)
    return value.one_by_one(trace)


def _extreme(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    picked = None if kwargs else pick(trace, fn, args)
    if picked is not None:
        return picked
    key = present(kwargs.get("key"))

    def asked(item: Value) -> StandIn:
        return StandIn(trace, item if key is None else trace.call(key, [item]))

    given: Sequence[Any] = args if len(args) > 1 else [args[0].each(trace)]
    return trace.real(fn, *given, **{**kwargs, "key": asked})


builtin_rule(min)(functools.partial(_extreme, min))
builtin_rule(max)(functools.partial(_extreme, max))


def sort_values(trace: Trace, items: Args, kwargs: Kwargs) -> Args:
    """The items in sorted order; stable, with `key` and `reverse`."""
    key = present(kwargs.get("key"))
    given = kwargs.get("reverse", Constant(False))
    unsupported_if(
        not issubclass(given.python_type(), int), "unsupported-call", f"reverse={given.describe()} of a sort"
    )
    reverse = trace.truth(given)
    keys = items if key is None else [trace.call(key, [item]) for item in items]
    real = constants(keys) if all_constant(keys) else [StandIn(trace, k) for k in keys]
    order = trace.real(sorted, range(len(items)), key=real.__getitem__, reverse=reverse)
    return [items[i] for i in order]


@builtin_rule(sorted)
def _sorted(trace: Trace, items: Value, /, **options: Value) -> Value:
    plain = isinstance(items, SetValue) and "key" not in options
    listed = items_in_any_order(trace, items) if plain else items.listed(trace)
    return ListValue(sort_values(trace, listed, options))


builtin_rule(divmod)(lambda trace, x, y: trace.binary(divmod, x, y))


def _by_method(fn: Callable[..., Any], trace: Trace, x: Value, *args: Value) -> Value:
    """A function of numbers, which asks other objects for a method of the same name."""
    if all_constant((x, *args)):
        return trace.real_call(fn, *constants((x, *args)))
    return trace.call_special(x, f"__{fn.__name__}__", [*args], {})


for _fn in (abs, round):
    builtin_rule(_fn)(functools.partial(_by_method, _fn))


@builtin_rule(pow)
def _pow(trace: Trace, base: Value, exponent: Value, mod: Value | None = None) -> Value:
    given = [base, exponent, *([] if mod is None else [mod])]
    if all_constant(given):
        return trace.real_call(pow, *constants(given))
    if mod is not None:
        if isinstance(base, UserObject) and trace.has_special(base, "__pow__"):
            found = trace.call_special(base, "__pow__", given[1:], {})
            if not (isinstance(found, Constant) and found.value is NotImplemented):
                return found
        raise unsupported("unsupported-call", "pow() with a modulus")
    return trace.binary(operator.pow, base, exponent)


builtin_rule(property, staticmethod, classmethod)(
    refusing(
        "unsupported-call", "a descriptor is made", cure="define the class outside the compiled function"
    )
)


def _generator(value: Value) -> GeneratorValue:
    if not isinstance(value, GeneratorValue):
        raise unsupported("generator", "a generator from outside is stepped")
    return value


@builtin_rule(types.GeneratorType.throw)
def _throw(
    trace: Trace, generator: Value, kind: Value, value: Value | None = None, traceback: Value | None = None
) -> Value:
    error = kind if value is None else value
    if isinstance(error, ClassValue):
        error = trace.call(error, [])
    return _generator_result(trace, _generator(generator).throw(trace, error))


@builtin_rule(types.GeneratorType.close)
def _close(trace: Trace, generator: Value) -> Value:
    _generator(generator).close(trace)
    return Constant(None)


def _generator_result(trace: Trace, result: tuple[bool, Value]) -> Value:
    yielded, value = result
    if yielded:
        return value
    raise trace.error(StopIteration, *([] if is_none(value) else [value]))


@builtin_rule(BaseException.with_traceback)
def _with_traceback(trace: Trace, error: Value, traceback: Value) -> Value:
    error.setattr(trace, "__traceback__", traceback)
    return error


@builtin_rule(type.__subclasses__)
def _subclasses(trace: Trace, kind: Value) -> Value:
    cls = kind.as_constant()
    found = trace.reader.ask(Const(cls, cls.__qualname__), cls, "its subclasses", _direct_subclasses)
    return ListValue([trace.make(each) for each in found])


def _direct_subclasses(cls: type) -> tuple[type, ...]:
    return tuple(type.__subclasses__(cls))
