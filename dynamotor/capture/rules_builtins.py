"""Call rules of Python's builtin functions and types.

>>> @builtin_rule(len)
... def _len(trace, args, kwargs): return args[0].length(trace)
"""

from __future__ import annotations

import builtins
import functools
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterable
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
from .values.constant import PURE_TYPES, Constant, RealIterator, is_none, present
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
    StrictZipIterator,
    ZipIterator,
)
from .values.klass import ClassValue, SuperValue
from .values.lazy_text import late_format, late_str_format
from .values.operators import c_name
from .values.picked import pick
from .values.slices import make_slice
from .values.string import formatted, shown, text_of
from .values.tensor import TensorValue
from .values.torch_function import HeldNumber
from .values.user_object import UserObject
from .values.walks import DictIterator, ReversedIterator, SequenceIterator

pure_functions.update(
    {abs, divmod, round, pow, chr, ord, bin, hex, oct, ascii, operator.index, sorted, min, max, sum, any, all}
)


def constants(args: Args) -> list[Any]:
    """The real objects of values that are all constant."""
    return [a.as_constant() for a in args]


def all_constant(args: Args, kwargs: Kwargs | None = None) -> bool:
    """Whether every argument is constant."""
    return all(a.is_constant() for a in args) and all(v.is_constant() for v in (kwargs or {}).values())


_TYPE_INSTANCE, _TYPE_SUBCLASS = type.__dict__["__instancecheck__"], type.__dict__["__subclasscheck__"]

register_all(
    builtin_rule,
    (
        (
            (isinstance,),
            lambda trace, args, kwargs: Constant(
                any(_is_instance(trace, args[0], kind) for kind in _kinds(trace, args[1]))
            ),
        ),
        (
            (issubclass,),
            lambda trace, args, kwargs: Constant(
                any(_is_subclass(trace, args[0], kind) for kind in _kinds(trace, args[1]))
            ),
        ),
        (
            (_TYPE_SUBCLASS,),
            lambda trace, args, kwargs: Constant(trace.derives(args[1].as_constant(), args[0].as_constant())),
        ),
        (
            (hasattr,),
            lambda trace, args, kwargs: Constant(trace.getattr_or_none(args[0], _name(args[1])) is not None),
        ),
        (
            (setattr,),
            lambda trace, args, kwargs: args[0].setattr(trace, _name(args[1]), args[2]) or Constant(None),
        ),
        (
            (delattr,),
            lambda trace, args, kwargs: args[0].delattr(trace, _name(args[1])) or Constant(None),
        ),
        ((any,), lambda trace, args, kwargs: Constant(any(map(trace.truth, _items(trace, args[0]))))),
        ((all,), lambda trace, args, kwargs: Constant(all(map(trace.truth, _items(trace, args[0]))))),
        ((list,), lambda trace, args, kwargs: ListValue(args[0].listed(trace) if args else [])),
        ((set,), lambda trace, args, kwargs: SetValue.of(trace, args[0] if args else [])),
        (
            (frozenset,),
            lambda trace, args, kwargs: (
                args[0]
                if args and args[0].python_type() is frozenset
                else SetValue.of(trace, args[0] if args else [], frozenset)
            ),
        ),
        ((bool,), lambda trace, args, kwargs: _bool(trace, args[0]) if args else Constant(False)),
        ((len,), lambda trace, args, kwargs: args[0].length(trace)),
        (
            (iter,),
            lambda trace, args, kwargs: (
                trace.call_python(polyfills.iter_until, args) if len(args) == 2 else args[0].iterate(trace)
            ),
        ),
        (
            (types.FunctionType.__get__,),
            lambda trace, args, kwargs: args[0] if is_none(args[1]) else BoundMethod(args[0], args[1]),
        ),
        ((repr,), lambda trace, args, kwargs: text_of(trace, args[0], repr)),
        (
            (str.join,),
            lambda trace, args, kwargs: trace.real_call(
                args[0].as_constant().join,
                constants(list(_items(trace, args[1], "can only join an iterable"))),
            ),
        ),
        ((map,), lambda trace, args, kwargs: MapIterator(args[0], *[a.iterate(trace) for a in args[1:]])),
        ((filter,), lambda trace, args, kwargs: FilterIterator(args[0], args[1].iterate(trace))),
        ((types.MethodType,), lambda trace, args, kwargs: BoundMethod(args[0], args[1])),
        (
            (types.GeneratorType.send,),
            lambda trace, args, kwargs: _generator_result(trace, _generator(args[0]).send(trace, args[1])),
        ),
        (
            (builtins.__import__,),
            lambda trace, args, kwargs: trace.real_call(
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
    if not isinstance(value, UserObject):
        return False
    if trace.type_attr(cls, "__class__") is object.__dict__["__class__"] and (
        _C.is_plain_access(trace.type_attr(cls, "__getattribute__"))
    ):
        return False
    claimed = value.getattr(trace, "__class__").as_constant()
    return claimed is not cls and isinstance(claimed, type) and trace.derives(claimed, kind)


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
def _type_instancecheck(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    cls, kind = args[1].python_type(), args[0].as_constant()
    return Constant(trace.derives(cls, kind) or _claims(trace, args[1], cls, kind))


@builtin_rule(type)
def _type(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    unsupported_if(
        len(args) != 1,
        "unsupported-call",
        "a class is made by type()",
        cure="define the class outside the compiled function",
    )
    return trace.make(args[0].python_type())


def _name(value: Value) -> str:
    """The name of an attribute; anything but a text has an error of its own."""
    unsupported_if(
        value.python_type() is not str, "unsupported-call", f"an attribute is named by {value.describe()}"
    )
    return value.as_constant()


@builtin_rule(getattr)
def _getattr(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    if len(args) == 2:
        return args[0].getattr(trace, _name(args[1]))
    found = trace.getattr_or_none(args[0], _name(args[1]))
    return args[2] if found is None else found


@builtin_rule(callable)
def _callable(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    if isinstance(args[0], Constant) and not args[0].symbolic and type(args[0]) is not HeldNumber:
        return Constant(callable(args[0].value))
    return Constant(trace.has_special(args[0], "__call__"))


@builtin_rule(id)
def _id(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    real = args[0].real()
    if real is not MISSING and args[0].source is not None and args[0].source.is_held:
        trace.reader.guard_identity(args[0].source, real)
        return Constant(id(real))
    unsupported_if(
        isinstance(args[0], Constant | BoundMethod),
        "unsupported-call",
        f"id() of {args[0].describe()}",
        "the number changes from run to run",
    )
    return Identity(args[0])


@builtin_rule(hash)
def _hash(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    if all_constant(args) and type(args[0].as_constant()) in PURE_TYPES:
        return trace.real_call(hash, args[0].as_constant())
    if isinstance(trace.type_attr(args[0].python_type(), "__hash__"), types.FunctionType):
        return trace.call_special(args[0], "__hash__", [], {})
    raise unsupported("unsupported-call", f"hash() of {args[0].describe()}")


@builtin_rule(vars)
def _vars(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    if not args:
        return trace.call(trace.make(locals), [])
    found = trace.getattr_or_none(args[0], "__dict__")
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
def _super(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    unsupported_if(len(args) == 1, "unsupported-call", "super() of a class alone, which is bound later")
    if args:
        return SuperValue(args[0].as_constant(), args[1])
    frame = trace.stack.frames[-1]
    index = frame.info.localsplus.index("__class__")
    cell, first = frame.fast[index], frame.fast[0]
    if frame.info.localsplus[0] in frame.info.code.co_cellvars:  # an inner function captures self
        first = first.load(trace)
    unsupported_if(first is None, "unsupported-call", "super() where the first argument has been deleted")
    return SuperValue(cell.load(trace).as_constant(), first)


# Conversions ------------------------------------------------------------------------------------------------
@builtin_rule(tuple)
def _tuple(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    if args and isinstance(args[0], Constant | TupleValue) and args[0].python_type() is tuple:
        return args[0]
    return TupleValue(args[0].listed(trace) if args else [])


@builtin_rule(dict)
def _dict(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    result = DictValue([])
    trace.update_dict(result, *args, named=kwargs)
    return result


def _number(kind: type, special: tuple[str, ...], trace: Trace, args: Args, kwargs: Kwargs) -> Value:
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
def _str(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    if len(args) != 1 or kwargs:
        return trace.real_call(str, *constants(args), **{k: v.as_constant() for k, v in kwargs.items()})
    return text_of(trace, args[0], str)


@builtin_rule(format)
def _format(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    spec = args[1].as_constant() if len(args) > 1 else ""
    value = args[0]
    waiting = late_format(trace, value, spec) if isinstance(spec, str) else None
    if waiting is not None:
        return waiting
    if isinstance(value, Constant) and value.is_plain:
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


@builtin_rule(str.format)
def _str_format(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    text = (getattr(args[0], "base", None) or args[0]).as_constant()
    if "{" not in text and "}" not in text:
        return args[0]
    waiting = late_str_format(trace, text, args[1:], kwargs)
    if waiting is not None:
        return waiting
    if all_constant(args, kwargs):
        return trace.real_call(
            text.format, *constants(args[1:]), **{k: v.as_constant() for k, v in kwargs.items()}
        )
    words = {name: shown(trace, value) for name, value in kwargs.items()}
    return formatted(trace, text.format, *[shown(trace, value) for value in args[1:]], **words)


@builtin_rule(slice)
def _slice(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    if not 1 <= len(args) <= 3 or kwargs:
        return trace.real_call(slice, *args, **kwargs)  # raises
    return make_slice([Constant(None), *args] if len(args) == 1 else args)


# Iteration --------------------------------------------------------------------------------------------------
@builtin_rule(next)
def _next(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    iterator = args[0] if isinstance(args[0], Iterator) else ObjectIterator(args[0])
    if not isinstance(args[0], Iterator) and not trace.has_special(args[0], "__next__"):
        raise trace.error(TypeError, f"'{c_name(args[0].python_type())}' object is not an iterator")
    if isinstance(iterator, GeneratorValue):
        yielded, item = iterator.send(trace, Constant(None))
        return _generator_result(trace, (yielded, item)) if yielded or len(args) == 1 else args[1]
    found = iterator.next(trace)
    if found is not None:
        return found
    if len(args) == 2:
        return args[1]
    raise trace.error(StopIteration)


def _step(fn: Callable[..., Any], trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    unsupported_if(
        len(args) != 1 or kwargs or not isinstance(args[0], Iterator),
        "unsupported-call",
        f"{fn.__qualname__} is called",
    )
    return _next(trace, args, kwargs)


@call_finder
def _find_step(fn: Callable[..., Any]) -> CallRule | None:
    """`__next__` of a C iterator, called by its name."""
    is_step = isinstance(fn, types.WrapperDescriptorType) and fn.__name__ == "__next__"
    return functools.partial(_step, fn) if is_step else None


@builtin_rule(range)
def _range(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    real = []
    for a in args:
        real.append(
            a.as_constant() if a.is_constant() else trace.call_special(a, "__index__", [], {}).as_constant()
        )
    return trace.real_call(range, *real)


@builtin_rule(enumerate)
def _enumerate(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    start = args[1] if len(args) > 1 else kwargs.get("start", Constant(0))
    unsupported_if(
        not args or start.python_type() is not int,
        "unsupported-call",
        "enumerate() counts from something other than an int",
    )
    return EnumerateIterator(args[0].iterate(trace), start)


@builtin_rule(zip)
def _zip(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    strict = kwargs.get("strict")
    kind = StrictZipIterator if strict is not None and trace.truth(strict) else ZipIterator
    return kind(*[a.iterate(trace) for a in args])


@builtin_rule(reversed)
def _reversed(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    value = args[0]
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
def _sum(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    total = args[1] if len(args) > 1 else kwargs.get("start", Constant(0))
    unsupported_if(issubclass(total.python_type(), str | bytes), "unsupported-call", "sum() of texts")
    for item in args[0].each(trace):
        total = trace.binary(operator.add, total, item)
    return total


def _items(trace: Trace, value: Value, refusal: str = "'{}' object is not iterable") -> Iterable[Value]:
    """The items of an iterable, one step after the other."""
    trace.must_iterate(value, refusal)
    return value.one_by_one(trace)


def _extreme(fn: Callable[..., Any], trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    picked = None if kwargs else pick(trace, fn, args)
    if picked is not None:
        return picked
    key = present(kwargs.get("key"))

    def asked(item: Value) -> StandIn:
        return StandIn(trace, item if key is None else trace.call(key, [item]))

    given = args if len(args) > 1 else [args[0].each(trace)]
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
def _sorted(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    plain = isinstance(args[0], SetValue) and "key" not in kwargs
    items = items_in_any_order(trace, args[0]) if plain else args[0].listed(trace)
    return ListValue(sort_values(trace, items, kwargs))


builtin_rule(divmod)(lambda trace, args, kwargs: trace.binary(divmod, *args))


def _by_method(fn: Callable[..., Any], trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    """A function of numbers, which asks other objects for a method of the same name."""
    if all_constant(args):
        return trace.real_call(fn, *constants(args))
    return trace.call_special(args[0], f"__{fn.__name__}__", args[1:], kwargs)


for _fn in (abs, round):
    builtin_rule(_fn)(functools.partial(_by_method, _fn))


@builtin_rule(pow)
def _pow(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    if all_constant(args):
        return trace.real_call(pow, *constants(args))
    if len(args) == 3 or kwargs:
        if isinstance(args[0], UserObject) and not kwargs and trace.has_special(args[0], "__pow__"):
            found = trace.call_special(args[0], "__pow__", args[1:], {})
            if not (isinstance(found, Constant) and found.value is NotImplemented):
                return found
        raise unsupported("unsupported-call", "pow() with a modulus")
    return trace.binary(operator.pow, args[0], args[1])


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
def _throw(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    error = args[2] if len(args) > 2 else args[1]
    if isinstance(error, ClassValue):
        error = trace.call(error, [])
    return _generator_result(trace, _generator(args[0]).throw(trace, error))


@builtin_rule(types.GeneratorType.close)
def _close(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    _generator(args[0]).close(trace)
    return Constant(None)


def _generator_result(trace: Trace, result: tuple[bool, Value]) -> Value:
    yielded, value = result
    if yielded:
        return value
    raise trace.error(StopIteration, *([] if is_none(value) else [value]))


@builtin_rule(BaseException.with_traceback)
def _with_traceback(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    args[0].setattr(trace, "__traceback__", args[1])
    return args[0]


@builtin_rule(type.__subclasses__)
def _subclasses(trace: Trace, args: Args, kwargs: Kwargs) -> Value:
    cls = args[0].as_constant()
    found = trace.reader.ask(Const(cls, cls.__qualname__), cls, "its subclasses", _direct_subclasses)
    return ListValue([trace.make(each) for each in found])


def _direct_subclasses(cls: type) -> tuple[type, ...]:
    return tuple(type.__subclasses__(cls))
