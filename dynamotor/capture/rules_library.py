"""Call rules for the standard library: functools, itertools, inspect, logging, warnings, os,
random, time.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import heapq
import importlib.util
import inspect
import itertools
import json
import logging
import operator
import os
import pickle
import random
import re
import sys
import textwrap
import time
import types
import typing
import warnings
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from ..base.narrowing import checked
from ..base.registry import register_all
from .breaks import unsupported, unsupported_if
from .interpreter import ITERATORS
from .op_state import check_cached
from .polyfills import cursors, itertools as polyfills
from .source import Called, Const, trusted_module
from .values.base import (
    MISSING,
    Args,
    CallRule,
    Kwargs,
    ResultEmitter,
    Trace,
    Value,
    binders,
    builtin_rule,
    builtin_rules,
    call_finder,
    calls_python,
    makers,
    named_rule,
    refusing,
    wrap_held,
    wrap_typed,
)
from .values.constant import PURE_TYPES, Constant, is_none
from .values.containers import DictValue, ListValue, TupleValue, contents_of
from .values.function import BoundMethod, FunctionValue, code_rule, keywords_of
from .values.instances import inline_function, pure_functions
from .values.klass import Builtin, ClassValue
from .values.operators import SYMBOLS
from .values.tensor import TensorValue
from .values.user_object import UserObject


# operator ---------------------------------------------------------------------------------------------------
def _operator_rule(op: Any) -> None:
    builtin_rules.setdefault(op, lambda trace, left, right: trace.binary(op, left, right))


for _op in SYMBOLS.values():
    _operator_rule(_op)


def _unary_rule(op: Any) -> None:
    builtin_rules.setdefault(op, lambda trace, value: value.unary(trace, op))


for _unary in (operator.neg, operator.pos, operator.invert):
    _unary_rule(_unary)
register_all(
    builtin_rule,
    (
        ((operator.getitem,), lambda trace, obj, key: obj.getitem(trace, key)),
        ((operator.contains,), lambda trace, obj, item: obj.contains(trace, item)),
        ((operator.not_,), lambda trace, obj: Constant(not trace.truth(obj))),
        ((operator.truth,), lambda trace, obj: Constant(trace.truth(obj))),
        ((operator.is_,), lambda trace, one, other: Constant(trace.same(one, other))),
        ((operator.is_not,), lambda trace, one, other: Constant(not trace.same(one, other))),
        (
            (operator.setitem,),
            lambda trace, obj, key, value: obj.setitem(trace, key, value) or Constant(None),
        ),
        ((operator.delitem,), lambda trace, obj, key: obj.delitem(trace, key) or Constant(None)),
    ),
)


# functools --------------------------------------------------------------------------------------------------
class PartialValue(UserObject):
    """A `functools.partial`, which keeps its function and arguments in C members."""

    __slots__ = ()

    def call(self, trace: Trace, args: Args, kwargs: Kwargs) -> Value:
        func, given, named = self.parts(trace)
        return trace.tail_call(func, [*given, *args], {**named, **kwargs})

    def parts(self, trace: Trace) -> tuple[Value, Args, Kwargs]:
        """The function, and the arguments that it is called with first."""
        func, given, named = [self.getattr(trace, name) for name in _PARTS]
        table = checked(DictValue, named).load()
        return func, given.unpack(trace), {k.as_constant(): v for k, v in table.values()}

    def _new(self, emitter: ResultEmitter) -> str:
        func, given, named = [self.slots.pop(name) for name in _PARTS]
        assert func is not None and given is not None and isinstance(named, DictValue)
        pairs = [f"{emitter.emit(key)}: {emitter.emit(value)}" for key, value in named.load().values()]
        words = f"{emitter.emit(func)}, *{emitter.emit(given)}, **{{{', '.join(pairs)}}}"
        return f"{emitter.constant(functools.partial)}({words})"


_PARTS = ("func", "args", "keywords")


@builtin_rule(pickle.dumps)
def _pickled(trace: Trace, obj: Value, /, *args: Value, **kwargs: Value) -> Value:
    """The bytes of an empty dict, by which caches of methods know calls without keywords. Those of what holds something
    tell which objects are one and the same.
    """
    unsupported_if(
        args or kwargs or type(obj) is not DictValue or obj.python_type() is not dict or bool(obj.load()),
        "unsupported-call",
        "pickle.dumps() is called",
        cure="call it outside the compiled function",
    )
    return Constant(pickle.dumps({}))


@builtin_rule(functools.partial)
def _partial(trace: Trace, func: Value, /, *args: Value, **kwargs: Value) -> Value:
    given = [*args]
    known = trace.truth(trace.call(trace.make(callable), [func]))
    unsupported_if(not known, "unsupported-call", f"functools.partial of {func.describe()}")
    if isinstance(func, PartialValue):
        func, first, named = func.parts(trace)
        given, kwargs = [*first, *given], {**named, **kwargs}
    made = PartialValue(functools.partial)
    named_values = keywords_of(kwargs)
    named_values.owner = weakref.ref(made)
    made.slots = dict(zip(_PARTS, (func, TupleValue(given), named_values)))
    return made


wrap_typed(lambda trace, source, obj: PartialValue(type(obj), source, obj), functools.partial)


def _call_cached(fn: Any, trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    everything = [*args, *kwargs.values()]
    wrapped = fn.__wrapped__
    unsupported_if(
        not isinstance(wrapped, types.FunctionType), "unsupported-call", "a cached C function is called"
    )
    if wrapped.__name__ in ("warning_once", "info_once", "warn_once"):
        _check_listeners(trace, args)
        trace.effects.later(trace.make(fn), [*args[:1]], [*args[1:]], kwargs)
        return Constant(None)
    package = (wrapped.__module__ or "").partition(".")[0]
    library = trusted_module(wrapped.__module__) or package in ("transformers", "timm")
    if library and all(v.is_constant() for v in everything):
        return trace.real_call(
            fn, *[a.as_constant() for a in args], **{k: v.as_constant() for k, v in kwargs.items()}
        )
    known = all(map(_is_key, everything))
    if library or package == "einops" and not known:  # whose shapes differ between calls
        return trace.call(trace.make(wrapped), [*args], kwargs)
    if not known:
        return _call_with_new_key(fn, trace, args, kwargs)
    real, named = list(map(_key, args)), {k: _key(v) for k, v in kwargs.items()}
    if package != "einops":  # its recipes depend on their arguments alone
        objects = tuple(v.real() for v in everything if not v.is_constant() and type(v) is not TupleValue)
        check_cached(trace, wrapped, objects)
    source, text = Const(fn, wrapped.__qualname__), f"called with {real}"
    return trace.make(trace.real(trace.reader.ask, source, fn, text, lambda f: f(*real, **named)))


def _call_with_new_key(fn: Any, trace: Trace, args: Sequence[Value], kwargs: Kwargs) -> Value:
    """A call with an object that the trace has made and that only equals itself: the cache has no result for it, and
    the trace keeps those of its own calls. The object must not leave the trace, or a later call would look for the
    result in the real cache.
    """
    everything = [*args, *kwargs.values()]
    owner = args[0] if args else None
    if owner is not None and _is_outside_key(trace, owner) and all(map(_is_key, everything[1:])):
        real, named = list(map(_key, args[1:])), {k: _key(v) for k, v in kwargs.items()}
        text = f"{fn.__wrapped__.__qualname__} called with {real}"
        answer = trace.real(
            trace.reader.ask, owner.source, owner.real(), text, lambda o: fn(o, *real, **named)
        )
        return trace.make(answer)
    new = [v for v in everything if _is_new_key(trace, v)]
    unsupported_if(
        not new or not all(_is_key(v) for v in everything if v not in new),
        "unsupported-call",
        f"{fn.__wrapped__.__qualname__} has a cache (functools.lru_cache)",
        "its result for these arguments is not known",
        "call it outside the compiled function",
    )
    key = (fn, *[v if v in new else _key(v) for v in args])
    key += tuple([(name, v if v in new else _key(v)) for name, v in kwargs.items()])
    if key not in trace.objects.cached:
        trace.objects.cached[key] = trace.call(trace.make(fn.__wrapped__), [*args], kwargs)
        for value in new:
            trace.objects.must_stay[value] = f"a cache holds a method's result for {value.describe()}"
    return trace.objects.cached[key]


def _is_new_key(trace: Trace, value: Value) -> bool:
    """Whether the trace has made an object that equals no other."""
    return isinstance(value, UserObject) and value.real() is MISSING and _equals_itself(trace, value.cls)


def _is_outside_key(trace: Trace, value: Value) -> bool:
    """Whether the real cache can be asked about an object from outside: it equals no other, and nothing has changed
    that the function could read."""
    outside = isinstance(value, UserObject) and value.real() is not MISSING and value.source is not None
    return outside and not trace.effects.changes_objects and _equals_itself(trace, value.python_type())


def _equals_itself(trace: Trace, cls: type) -> bool:
    hashes = (object.__hash__, torch.nn.Module.__hash__)
    return trace.type_attr(cls, "__hash__") in hashes and trace.type_attr(cls, "__eq__") is object.__eq__


@call_finder
def _find_cached(fn: Callable[..., Any]) -> CallRule | None:
    """A function under lru_cache: run for real on constants when its module is a library's, inlined
    otherwise. The program's own is asked for its value of constants."""
    return functools.partial(_call_cached, fn) if isinstance(fn, functools._lru_cache_wrapper) else None


def _is_key(value: Value) -> bool:
    """Whether a value is equal to itself at every call: as a key of a cache must be."""
    if type(value) is TupleValue:
        return all(map(_is_key, value.items))
    if isinstance(value, Constant):
        return value.is_plain or isinstance(value, ClassValue)
    return type(value.source) is Const and value.real() is not MISSING  # what another cache gave, for example


def _key(value: Value) -> Any:
    return value.as_constant() if value.is_constant() else value.real()


@binders.register(functools._lru_cache_wrapper)
def _bind_cached_method(trace: Trace, raw: Any, name: str, instance: Value, cls: type) -> Value:
    return BoundMethod(trace.type_attr_value(cls, name, raw), instance)


# itertools --------------------------------------------------------------------------------------------------
def _polyfill(original: Any, replacement: Any) -> None:
    if isinstance(original, type) and isinstance(replacement, types.FunctionType):
        ITERATORS[replacement.__code__] = original
    builtin_rules.setdefault(original, calls_python(replacement))


def _iterator(original: Any, replacement: Any) -> None:
    """A class of itertools, that refuses arguments and asks for their iterators at the call, not at the
    first step.
    """
    asked = _ASKED.get(original, (0, "iterable"))

    def rule(trace: Trace, *args: Value, **kwargs: Value) -> Value:
        try:
            original(*map(_stand_in, args), **{name: _stand_in(value) for name, value in kwargs.items()})
        except Exception as error:
            raise unsupported("unsupported-call", f"{original.__name__}() refuses", str(error)) from None
        pools = _POOLS.get(original, 0)
        given = [*[TupleValue(arg.unpack(trace)) for arg in args[:pools]], *args[pools:]]
        given = [arg.iterate(trace) if pools <= n and n in asked else arg for n, arg in enumerate(given)]
        names = asked if type(asked) is tuple else ()  # a range would be walked for a text
        named = {name: arg.iterate(trace) if name in names else arg for name, arg in kwargs.items()}
        return trace.call_python(replacement, given, named)

    builtin_rules.setdefault(original, rule)
    _polyfill(original, replacement)


# How many arguments are read at the call, and which are asked for their iterators there, by place or name.
_POOLS = {itertools.product: sys.maxsize, itertools.combinations: 1, itertools.permutations: 1}
_ASKED: dict[Any, Container[Any]] = {
    **dict.fromkeys((itertools.chain, itertools.repeat, itertools.count), ()),
    **dict.fromkeys(
        (itertools.starmap, itertools.takewhile, itertools.dropwhile, itertools.filterfalse), (1,)
    ),
    itertools.compress: (0, 1, "data", "selectors"),
    itertools.zip_longest: range(sys.maxsize),
}


def _stand_in(value: Value) -> Any:
    """A possible argument of a library's iterator, to see whether the class takes it."""
    kind = value.python_type()
    if kind in (int, float):
        return value.as_constant() if value.is_constant() else kind(1)
    return None if is_none(value) else ()


for _name in (
    "chain",
    "islice",
    "tee",
    "repeat",
    "count",
    "cycle",
    "product",
    "accumulate",
    "starmap",
    "takewhile",
    "dropwhile",
    "zip_longest",
    "pairwise",
    "combinations",
    "permutations",
    "compress",
    "filterfalse",
    "groupby",
):
    _iterator(getattr(itertools, _name), getattr(polyfills, _name))
_iterator(itertools.chain.from_iterable, polyfills.chain_from_iterable)
ITERATORS[polyfills.tee_branch.__code__] = cursors.Tee
ITERATORS[polyfills.group_of.__code__] = cursors.Group
ITERATORS[polyfills.iter_until.__code__] = cursors.Until


# inspect, dataclasses, typing -------------------------------------------------------------------------------
def _real_function(value: Value) -> Any:
    if isinstance(value, BoundMethod):
        owner = value.instance.real()
        fn = _real_function(value.func)
        return types.MethodType(fn, owner if owner is not MISSING else object())
    real = value.real()
    if real is MISSING:
        raise unsupported("unsupported-call", f"the signature of {value.describe()}")
    return real


register_all(
    builtin_rule,
    (
        (
            (inspect.signature,),
            lambda trace, fn: trace.real_call(inspect.signature, _real_function(fn)),
        ),
        ((typing.cast,), lambda trace, typ, val: val),
        (
            (logging.getLogger,),
            lambda trace, name=None: trace.real_call(
                logging.getLogger, *([] if name is None else [name.as_constant()])
            ),
        ),
    ),
)


@builtin_rule(dataclasses.fields)
def _fields(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """As its own code, which runs a frame for each field: a transformer's outputs have ten."""
    table = None
    if len(args) == 1 and not kwargs and isinstance(args[0], UserObject):
        found = trace.type_attr(args[0].cls, "__dataclass_fields__")
        table = None if found is MISSING else contents_of(args[0].getattr(trace, "__dataclass_fields__"))
    if not isinstance(table, DictValue):
        return inline_function(trace, dataclasses.fields, [*args], kwargs)
    fields = [field for _, field in table.load().values()]
    plain = vars(dataclasses)["_FIELD"]
    return TupleValue([f for f in fields if f.getattr(trace, "_field_type").real() is plain])


def _call_pure(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """A library function written in Python that is pure: run for real when all is known, inlined
    otherwise.
    """
    if all(v.is_constant() for v in (*args, *kwargs.values())):
        return trace.real_call(
            fn, *[a.as_constant() for a in args], **{k: v.as_constant() for k, v in kwargs.items()}
        )
    return inline_function(trace, fn, [*args], kwargs)


for _fn in (
    re.compile,
    re.match,
    re.search,
    re.fullmatch,
    re.sub,
    re.split,
    re.findall,
    re.escape,
    json.dumps,
    json.loads,
    os.path.join,
    os.path.basename,
    os.path.dirname,
    os.path.splitext,
    textwrap.dedent,
    inspect.cleandoc,
    enum.Flag.__invert__,  # which keeps its answer on the member
):
    builtin_rules.setdefault(_fn, functools.partial(_call_pure, _fn))
_polyfill(vars(collections)["_count_elements"], polyfills.count_elements)
PURE_TYPES.update({re.Pattern, re.Match})
makers[type(re.finditer("", ""))] = lambda trace, found: TupleValue(
    [trace.make(match) for match in found]
).iterate(trace)


class Held(Builtin):
    """An object of the standard library, held by identity; those that describe code are taken as constant."""

    __slots__ = ()

    def getattr(self, trace: Trace, name: str) -> Value:
        if isinstance(self.value, inspect.Signature | inspect.Parameter | dataclasses.Field):
            return trace.real_call(getattr, self.value, name)
        return Value.getattr(self, trace, name)

    def call(self, trace: Trace, args: Args, kwargs: Kwargs) -> Value:
        if type(self.value) is not weakref.ref or args or kwargs:
            return super().call(trace, args, kwargs)
        source = self.source if self.source is not None else Const(self.value, "weakref")
        return trace.wrap(Called(source, _TARGET), self.value())


wrap_held(
    Held,
    weakref.ReferenceType,
    inspect.Signature,
    inspect.Parameter,
    dataclasses.Field,
    re.Pattern,
    re.Match,
)


_TARGET = weakref.ref.__call__


@builtin_rule(weakref.ref)
def _weak(trace: Trace, obj: Value, *callback: Value) -> Value:
    """The one reference without a callback that an object from outside has."""
    if callback or obj.source is None or obj.real() is MISSING:
        return _other_weak(trace, obj)
    return trace.wrap(Called(obj.source, weakref.ref), weakref.ref(obj.real()))


@builtin_rule(weakref.proxy)
def _other_weak(trace: Trace, obj: Value, *callback: Value) -> Value:
    """Objects of the trace end when CPython alone knows."""
    kind = "finalizer" if obj.source is None else "unsupported-call"
    raise unsupported(kind, f"a weak reference to {obj.describe()} is made")


# Dispatch by class ------------------------------------------------------------------------------------------
@code_rule(functools.singledispatch(len).dispatch.__code__)
def _dispatch(trace: Trace, fn: FunctionValue, cls: Value) -> Value:
    """`singledispatch` is asked at each call which function it has for a class."""
    if fn.fn is MISSING or not isinstance(cls, ClassValue):
        raise unsupported("unsupported-call", "a singledispatch function made in the trace is called")
    source = fn.source if fn.source is not None else Const(fn.fn, "dispatch")
    return trace.make(trace.reader.ask(source, fn.fn, f"for {cls.value}", lambda f: f(cls.value)))


# Modules that are also written in Python --------------------------------------------------------------------
def _in_python(name: str) -> types.ModuleType:
    """The module without the functions that C has for it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    pure, accelerated = importlib.util.module_from_spec(spec), sys.modules.get(f"_{name}")
    modules: dict[str, Any] = sys.modules
    modules[f"_{name}"] = None  # the import of `_name` fails
    try:
        spec.loader.exec_module(pure)
    finally:
        modules[f"_{name}"] = accelerated
    return pure


def _heap_rule(function: types.FunctionType, trace: Trace, heap: Value, *args: Value) -> Value:
    empty = isinstance(heap, ListValue) and not heap.items
    unsupported_if(
        not isinstance(heap, ListValue) or empty and function.__name__ in ("heappop", "heapreplace"),
        "unsupported-call",
        f"{function.__name__} is called, which raises",
    )
    return trace.call_python(function, [heap, *args])


_heapq = _in_python("heapq")
for _name in [
    "heappush",
    "heappop",
    "heapify",
    "heapreplace",
    "heappushpop",
    "_heapify_max",
    "_heapreplace_max",
]:
    builtin_rules[getattr(heapq, _name)] = functools.partial(_heap_rule, getattr(_heapq, _name))
_polyfill(functools.reduce, _in_python("functools").reduce)
_operator = _in_python("operator")
for _name in ("itemgetter", "attrgetter", "methodcaller"):
    _polyfill(getattr(operator, _name), getattr(_operator, _name))


# Messages ---------------------------------------------------------------------------------------------------
@call_finder
def _find_logging(fn: Callable[..., Any]) -> CallRule | None:
    """Logger methods and warnings: replayed after the graph (once per call of the compiled function)."""
    if not isinstance(fn, types.FunctionType):
        return None
    once = fn.__name__ in ("warning_once", "info_once", "warn_once")
    if not (once or fn.__module__ == "logging" and fn.__qualname__ in _LOGGED):
        return None

    def rule(trace: Trace, logger: Value, *args: Value, **kwargs: Value) -> Value:
        if not once and not _is_logged(trace, fn.__name__, logger, *args):
            return Constant(None)
        _check_listeners(trace, [logger])
        unsupported_if(
            fn.__name__ == "exception" or "exc_info" in kwargs or "stack_info" in kwargs,
            "side-effect",
            "a message with a traceback or stack is logged",
            "they are those of the call",
        )
        trace.effects.later(trace.make(fn), [logger], [*args], kwargs)
        return Constant(None)

    return rule


_LEVELS = {"debug": 10, "info": 20, "warning": 30, "warn": 30, "error": 40, "exception": 40, "critical": 50}


def _is_logged(trace: Trace, name: str, logger: Value, *args: Value) -> bool:
    """Whether a logger lets a message through; the answer is guarded."""
    level = args[0] if name == "log" else Constant(_LEVELS[name])
    return trace.truth(trace.call_method(logger, "isEnabledFor", [level]))


def _check_listeners(trace: Trace, args: Sequence[Value]) -> None:
    """Break the graph before a message that runs code of the program, which would see objects as they are after the
    graph. The answer is guarded.
    """
    logger = args[0].real() if args else MISSING
    if isinstance(logger, logging.Logger) and args[0].source is not None:
        heard = trace.reader.ask(args[0].source, logger, "whose code handles messages", _runs_user_code)
        unsupported_if(
            heard, "side-effect", "a handler, filter or formatter that is not of logging gets a message"
        )


def _runs_user_code(logger: logging.Logger) -> bool:
    """Whether a message goes through handlers, filters, formatters or records of classes of the program."""
    if logging.getLogRecordFactory() is not logging.LogRecord or logger.filters:
        return True
    here: logging.Logger | None = logger
    while here is not None:
        if any(map(_is_of_the_program, here.handlers)):
            return True
        here = here.parent if here.propagate else None
    return False


def _is_of_the_program(handler: logging.Handler) -> bool:
    parts = (type(handler), type(handler.formatter))
    return bool(handler.filters) or any(
        issubclass(cls, logging.Handler | logging.Formatter) and not cls.__module__.startswith(_OWN_HANDLERS)
        for cls in parts
    )


_OWN_HANDLERS = ("logging", "_pytest.logging")  # pytest's keep the records

_LOGGED = {
    f"Logger.{n}" for n in ("debug", "info", "warning", "error", "critical", "log", "warn", "exception")
}


@builtin_rule(logging.Logger.isEnabledFor, logging.Logger.getEffectiveLevel)
def _enabled(trace: Trace, logger: Value, level: Value | None = None) -> Value:
    source, real = logger.source, logger.real()
    unsupported_if(real is MISSING or source is None, "unsupported-call", "a logger made in the trace")
    trace.reader.guard_identity(source, real)
    if level is None:
        return Constant(trace.reader.ask(source, real, "the level", logging.Logger.getEffectiveLevel))
    least = level.as_constant()
    return Constant(trace.reader.ask(source, real, f"logging {least}", lambda now: now.isEnabledFor(least)))


@builtin_rule(warnings.warn, warnings.warn_explicit)
def _warn(trace: Trace, *args: Value, **kwargs: Value) -> Value:
    unsupported_if(
        trace.reader.ask(
            Const(warnings, "warnings"),
            warnings,
            "whether one raises",
            lambda now: any(f[0] == "error" for f in now.filters),
        ),
        "side-effect",
        "a warning may be raised as an error",
    )
    unsupported_if(
        trace.reader.ask(Const(warnings, "warnings"), warnings, "who shows one", _is_shown_by_the_program),
        "side-effect",
        "a function of the program shows warnings",
        "it would see objects as they are after the graph",
    )
    record = getattr(vars(warnings)["_showwarnmsg_impl"], "__self__", None)
    unsupported_if(
        id(record) in trace.reader.values, "side-effect", "a warning goes to a list that the function has"
    )
    trace.effects.later(
        trace.make(warnings.warn), [], [*args], {k: v for k, v in kwargs.items() if k != "stacklevel"}
    )
    return Constant(None)


def _is_shown_by_the_program(now: Any) -> bool:
    """Whether `showwarning` or `formatwarning` was replaced; by logging's capture only if that runs no such code."""
    if now.showwarning is vars(logging)["_showwarning"]:
        return _runs_user_code(logging.getLogger("py.warnings"))
    return now.showwarning is not now._showwarning_orig or now.formatwarning is not now._formatwarning_orig


# The outside world ------------------------------------------------------------------------------------------
@call_finder
def _find_outside(fn: Callable[..., Any]) -> CallRule | None:
    """random, time and the like change from call to call."""
    module = getattr(fn, "__module__", None)
    owner = getattr(fn, "__self__", None)
    if module in ("random", "time", "secrets", "uuid", "_random", "datetime") or isinstance(
        owner, random.Random
    ):
        name = getattr(fn, "__name__", fn)
        return refusing("random", f"{name} is called", "its result changes from call to call")
    return None


# Once torch.compile has run, PyTorch's modules count themselves when they are made; caches of transformers mark
# tensors for its CUDA graphs. Nothing that a program sees.
named_rule(
    "torch._dynamo.mutation_guard:GenerationTracker.tag", "torch._dynamo.decorators:mark_static_address"
)(lambda fn, trace, /, *args, **kwargs: Constant(None))


@named_rule("torch._dynamo.decorators:mark_static", "dynamotor.capture.symbolic_inputs:mark_static")
def _mark_static(fn: Callable[..., Any], trace: Trace, tensor: Value, index: Value | None = None) -> Value:
    """The sizes are numbers from here on; the mark itself says nothing to who runs the program."""
    sizes = tensor.getattr(trace, "shape").unpack(trace) if type(tensor) is TensorValue else []
    dim = index.as_constant() if index is not None and index.is_constant() else None
    plain = index is None or type(dim) is int and -len(sizes) <= dim < len(sizes)
    unsupported_if(not (sizes and plain), "unsupported-call", "mark_static() with unusual arguments")
    for size in sizes if dim is None else [sizes[dim]]:
        size.as_constant()
    return Constant(None)


@builtin_rule(sys.exc_info)
def _exc_info(trace: Trace) -> Value:
    handled = trace.exception()
    if handled is None:
        return trace.make((None, None, None))
    return TupleValue([trace.make(handled.python_type()), handled, handled.getattr(trace, "__traceback__")])


builtin_rule(sys.exception)(lambda trace: trace.exception() or Constant(None))


@builtin_rule(sys._getframe)
def _frame(trace: Trace, *args: Value) -> Value:
    stop = unsupported(
        "frames", "the stack of Python frames is read", "inlined functions have none", "pass the needed value"
    )
    stop.whole = trace.stack.frames[-1].code.co_filename not in [  # they only name the module of a class
        m.__file__ for m in (collections, enum, typing)
    ]
    raise stop


builtin_rule(time.time, time.perf_counter, time.monotonic)(
    refusing("random", "the clock is read", "its value changes from call to call")
)


# collections ------------------------------------------------------------------------------------------------
builtin_rule(collections.namedtuple)(
    refusing("unsupported-call", "a namedtuple class is made", cure="make it outside the compiled function")
)


_PATHS = (getattr(os.path, name, None) for name in ("normpath", "splitroot"))  # in C in some versions
pure_functions.update(fn for fn in _PATHS if isinstance(fn, types.BuiltinFunctionType))
pure_functions.update({typing.get_origin, typing.get_args, sys.intern, os.path.join, os.fspath})


# transformers, by name: checks that only warn, and bookkeeping that is the same at every call ----------------
@named_rule("transformers.utils.generic:_register_model_output_pytree_node")
def _run_once(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """Idempotent registrations of classes: done while tracing."""
    fn(*[a.as_constant() for a in args], **{name: v.as_constant() for name, v in kwargs.items()})
    return Constant(None)


@named_rule("transformers.modeling_utils:PreTrainedModel.warn_if_padding_and_no_attention_mask")
def _warn_after(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """Functions that look at data to warn about it: the graph looks, and where there is something to warn of they are
    called after it.
    """
    when = trace.checks.warns(lambda: inline_function(trace, fn, [*args], kwargs))
    if when is not None:
        trace.effects.later(trace.make(fn), [*args[:1]], [*args[1:]], kwargs, when)
    return Constant(None)


@named_rule("transformers.utils.import_utils:is_tracing")
def _traced(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """`is_tracing(tensor)` stands before shortcuts that look at data and do not change the result: not to be
    taken.

    Without a tensor (no mask was given) there is no data to look at; a check that only warns is made.
    """
    given = not all(map(is_none, (*args, *kwargs.values())))
    return Constant(given and trace.checks.asked is None)
