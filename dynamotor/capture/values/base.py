"""The interpreter's values: `Value` and the tables that turn Python objects into values and calls
into rules.

A value stands for one Python object during a trace. `source` says where it comes from outside (None: made in
the trace). One object is one value: `is` compares values, so never make two values of one outside object; use
`trace.wrap`.

>>> @builtin_rule(len)
... def _len(trace, obj): return obj.length(trace)
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ... import _C
from ...base.registry import Deferred, MaybeNone, Registry
from ..breaks import OfTrace, unsupported, unsupported_if
from ..guards import IdIs, TypeIs
from ..source import Source
from .operators import UNARY, special_name

if TYPE_CHECKING:  # every rule names these in its annotations, and they import the values
    from ..result_emitter import ResultEmitter as ResultEmitter
    from ..trace import Trace as Trace
else:
    ResultEmitter = Trace = Any

NONE_CALLED = "'NoneType' object is not callable"  # the error of a special method set to None
_OBJECT_ORDER = object.__lt__, object.__le__, object.__gt__, object.__ge__  # type: ignore[operator]
Result = TypeVar("Result")
Args = list["Value"]
Kwargs = dict[str, "Value"]
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()


class Epoch:
    """Counts the parts of traces that may have no effects: objects made before one began are not theirs."""

    now = 0


class Raised(OfTrace):
    """An exception that the traced program itself raises (`value` is the exception instance); user code may
    catch it.
    """

    def __init__(self, value: Value, again: bool = False) -> None:
        super().__init__(value)
        self.value = value
        self.stack: tuple[Any, ...] = ()  # the user's lines where it left the first frame
        self.again = again  # its traceback knows the line already

    def is_a(self, kind: type | tuple[type, ...]) -> bool:
        """Whether `except kind` would catch it."""
        return issubclass(self.value.python_type(), kind)


class Value:
    """One Python object in a trace. The methods follow CPython's protocols; the defaults look methods up on
    the type.

    Every method that runs code takes the trace first. They raise `Raised` for exceptions of the user's
    program and `Unsupported` (see breaks.py) for what cannot be captured.
    """

    __slots__ = ("source", "__weakref__")
    source: Source | MaybeNone
    kind: type  # the class of the object, unless `python_type` is written
    obj: Any = MISSING  # the outside object itself, where there is one
    held = False  # a number that data decides: it is handed on, unread
    late = False  # a text that is written behind the graph
    symbolic = False  # a size that is an expression, or a sequence that holds one (values/size.py)

    def __init__(self, source: Source | None = None) -> None:
        self.source = source

    def python_type(self) -> type:
        """The class of the object that this value stands for."""
        return self.kind

    @property
    def takes_over(self) -> bool:
        """Whether calls of PyTorch go to its class (rules_overrides.py), or to that of an item."""
        return False

    def is_constant(self) -> bool:
        """Whether `as_constant` works: the whole object (with everything in it) is known and immutable for
        the trace.
        """
        return False

    def as_constant(self) -> Any:
        """The real object, when it is known and needs no graph."""
        raise unsupported("unsupported-value", f"{self.describe()} would have to be a constant")

    def real(self) -> Any:
        """The outside object itself if this value has one (it may hold mutable state), else MISSING."""
        return self.obj

    def hash_key(self, trace: Trace) -> Hashable:
        """What stands for this value as a key of a dict or a member of a set."""
        raise unsupported(
            "unsupported-value", f"{self.python_type().__name__} used as a dictionary key or set member"
        )

    # Attributes ---------------------------------------------------------------------------------------------
    def getattr(self, trace: Trace, name: str) -> Value:
        """`self.name`: what `__getattribute__` of the class finds, then its `__getattr__`."""
        cls = self.python_type()
        custom = trace.type_attr(cls, "__getattribute__")
        if isinstance(custom, types.FunctionType):
            find = trace.bind(custom, "__getattribute__", self, cls)
            return trace.getattr_hook(self, cls, name, lambda: trace.call(find, [trace.make(name)]))
        if not _C.is_plain_access(custom):
            return trace.foreign_getattr(self, cls, name)
        return trace.getattr_hook(self, cls, name, lambda: trace.object_getattr(self, cls, name))

    def setattr(self, trace: Trace, name: str, value: Value) -> None:
        """`self.name = value`."""
        self._change(trace, "__setattr__", name, value)

    def delattr(self, trace: Trace, name: str) -> None:
        """`del self.name`."""
        self._change(trace, "__delattr__", name)

    def _change(self, trace: Trace, method: str, name: str, *new: Value) -> None:
        """The class's rule for setting or deleting an attribute: data descriptors, else `store_attr`."""
        cls = self.python_type()
        custom = trace.type_attr(cls, method)
        if isinstance(custom, types.FunctionType):
            trace.call(trace.bind(custom, method, self, cls), [trace.make(name), *new])
        elif not _C.is_plain_access(custom):
            raise unsupported("unsupported-mutation", f"attribute {name!r} of {self.describe()} is set")
        else:
            trace.object_setattr(self, cls, name, *new)

    def instance_attr(self, trace: Trace, name: str) -> Value | None:
        """The entry of the instance's `__dict__`, or None. Reading the absence guards it too."""
        return None

    def store_attr(self, trace: Trace, name: str, value: Value | None) -> None:
        """Write (None: delete) an entry of the instance's `__dict__`, recorded as an effect if the object is
        outside.
        """
        raise unsupported("unsupported-mutation", f"attribute {name!r} of {self.describe()} is set")

    # Calls and operators ------------------------------------------------------------------------------------
    def call(self, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """`self(*args, **kwargs)`. Never call this directly: use `trace.call`, or `return
        trace.tail_call(...)` when the result is returned as it is (a break inside can then resume; see
        trace.py)."""
        return trace.call_special(self, "__call__", args, kwargs)

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        """`self op other` (`other op self` when reflected), where op is from `operator` (`operator.iadd` for
        `+=`). None means NotImplemented. Comparisons (`operator.lt`, `operator.eq`, ...) come here as well.
        """
        name, cls = special_name(op, reflected), self.python_type()
        raw = trace.type_attr(cls, name)
        if raw is MISSING or raw is object.__eq__ or any(raw is o for o in _OBJECT_ORDER):
            return None
        if raw is None:
            raise trace.error(TypeError, NONE_CALLED)
        if raw is object.__ne__:
            equal = Value.binary(self, trace, operator.eq, other)
            return None if equal is None else trace.make(not trace.truth(equal))
        result = trace.call(trace.bind(raw, name, self, cls), [other])
        return None if result.python_type() is type(NotImplemented) else result

    def unary(self, trace: Trace, op: Callable[..., Any]) -> Value:
        """`op self` for `operator.neg`, `pos`, `invert`."""
        return trace.call_special(self, UNARY[op], [], {})

    def truth(self, trace: Trace) -> bool:
        """`bool(self)`: `__bool__`, then `__len__`, else True."""
        if trace.has_special(self, "__bool__"):
            return bool(trace.call_special(self, "__bool__", [], {}).as_constant())
        return bool(self.length(trace).as_constant()) if trace.has_special(self, "__len__") else True

    # Containers ---------------------------------------------------------------------------------------------
    def length(self, trace: Trace) -> Value:
        """`len(self)`."""
        return trace.call_special(self, "__len__", [], {})

    def getitem(self, trace: Trace, key: Value) -> Value:
        """`self[key]`."""
        return trace.call_special(self, "__getitem__", [key], {})

    def setitem(self, trace: Trace, key: Value, value: Value) -> None:
        """`self[key] = value`."""
        trace.call_special(self, "__setitem__", [key, value], {})

    def delitem(self, trace: Trace, key: Value) -> None:
        """`del self[key]`."""
        lacks = not trace.has_special(self, "__delitem__")
        unsupported_if(lacks, "unsupported-mutation", f"an item of {self.describe()} is deleted")
        trace.call_special(self, "__delitem__", [key], {})

    def contains(self, trace: Trace, item: Value) -> Value:
        """`item in self` as a bool value: `__contains__`, else a search by iteration."""
        if trace.has_special(self, "__contains__"):
            return trace.make(trace.truth(trace.call_special(self, "__contains__", [item], {})))
        trace.must_iterate(self, "argument of type '{}' is not iterable")
        return trace.make(any(trace.equal(item, other) for other in self.one_by_one(trace)))

    def iterate(self, trace: Trace) -> Iterator:
        """`iter(self)`: `__iter__`, else the `__getitem__` sequence protocol."""
        if trace.has_special(self, "__iter__") or not trace.has_special(self, "__getitem__"):
            result = trace.call_special(self, "__iter__", [], {})
            unsupported_if(
                not isinstance(result, Iterator) and not trace.has_special(result, "__next__"),
                "unsupported-call",
                f"__iter__ of {self.describe()} gives {result.describe()}",
            )
            return ObjectIterator(result) if not isinstance(result, Iterator) else result
        return IndexIterator(self)

    def one_by_one(self, trace: Trace) -> Iterable[Value]:
        """The items that iterating gives, one step after the other."""
        iterator = self.iterate(trace)
        while (item := iterator.next(trace)) is not None:
            yield item

    def each(self, trace: Trace) -> Iterable[Value]:
        """The items that iterating gives, each made when it is asked for: for who shows the program what came
        before."""
        there = type(self).unpack is not Value.unpack  # in a container
        return self.unpack(trace) if there else self.one_by_one(trace)

    def unpack(self, trace: Trace) -> list[Value]:
        """All items that iterating gives."""
        return list(self.one_by_one(trace))

    def listed(self, trace: Trace) -> list[Value]:
        """All items as `list(value)` takes them, which asks an object for its length first."""
        return self.unpack(trace)

    # Leaving the trace --------------------------------------------------------------------------------------
    def reconstruct(self, emitter: ResultEmitter) -> str:
        """A Python expression of the object for the generated `finish` function; only called for values made
        in the trace (values from outside are fetched by their source)."""
        raise unsupported("reconstruct", f"{self.describe()} leaves the captured region")

    def describe(self) -> str:
        """A few words for messages."""
        return f"a {self.python_type().__name__}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"


_asked: set[int] = set()


def once(container: Value, ask: Callable[[], bool]) -> bool:
    """The answer for all items; False where one of them leads back to the container."""
    if id(container) in _asked:
        return False
    _asked.add(id(container))
    try:
        return ask()
    finally:
        _asked.discard(id(container))


class ObjectKey:
    """An object with `__hash__` and `__eq__` of its own as a key: the program's own methods decide. Two that were
    compared are not compared again: what looks them up once more is the bookkeeping of a container.
    """

    __slots__ = ("trace", "value", "hash", "known")

    def __init__(self, trace: Trace, value: Value, hash_: int) -> None:
        self.trace, self.value, self.hash = trace, value, hash_
        self.known: dict[int, tuple[object, bool]] = {}

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if type(other) in (int, float, bool, str, bytes):
            return hash(other) == self.hash and self.trace.equal(self.value, self.trace.make(other))
        if not isinstance(other, ObjectKey) or other.hash != self.hash:
            return False
        known = self.known.get(id(other)) or other.known.get(id(self))
        if known is None:
            known = self.known[id(other)] = other, self.trace.equal(self.value, other.value)
        return known[1]


class IdentityKey:
    """An id as a key. All of them share one hash, so that a container compares them one by one."""

    __slots__ = ("trace", "of")

    def __init__(self, trace: Trace, of: Value) -> None:
        self.trace, self.of = trace, of

    def __hash__(self) -> int:
        return hash(IdentityKey)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.trace.same(self.of, other.of)

    def refuse_numbers(self, among: Iterable[Value] | None) -> None:
        """Break the graph where a container may hold this id as a number: one from outside (None), or numbers."""
        unsupported_if(
            among is None or any(v.is_constant() and issubclass(v.python_type(), int) for v in among),
            "unsupported-call",
            f"id() of {self.of.describe()} is compared with numbers",
            "the number changes from run to run",
        )


def _order(op: Callable[..., Any]) -> Callable[[StandIn, StandIn], StandIn]:
    return lambda self, other: StandIn(self.trace, self.trace.binary(op, self.value, other.value))


class StandIn:
    """A value in the hands of CPython's own C code, which compares it or shows it: what that asks of an object is
    asked in the trace.

    >>> repr([StandIn(trace, value)]), max(StandIn(trace, value) for value in values)
    """

    __slots__ = ("trace", "value")

    def __init__(self, trace: Trace, value: Value) -> None:
        self.trace, self.value = trace, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and self.trace.equal(self.value, other.value)

    __lt__, __le__, __gt__, __ge__ = map(_order, (operator.lt, operator.le, operator.gt, operator.ge))
    __hash__ = object.__hash__  # as the key of a dict that is shown

    def __bool__(self) -> bool:
        return self.trace.truth(self.value)

    def __str__(self) -> str:
        return self.trace.text_of(self.value, str).as_constant()

    def __repr__(self) -> str:
        return self.trace.text_of(self.value, repr).as_constant()

    def __format__(self, spec: str) -> str:
        trace = self.trace
        return trace.call(trace.make(format), [self.value, trace.make(spec)]).as_constant()


class Iterator(Value):
    """A value with `__next__`."""

    __slots__ = ()

    def next(self, trace: Trace) -> Value | None:
        """The next item, or None when there is none left (StopIteration)."""
        raise NotImplementedError

    def iterate(self, trace: Trace) -> Iterator:
        return self

    def hash_key(self, trace: Trace) -> Hashable:
        return self


class ObjectIterator(Iterator):
    """Steps a user's object with `__next__`."""

    __slots__ = ("target",)

    def __init__(self, target: Value) -> None:
        super().__init__()
        self.target = target

    def python_type(self) -> type:
        return self.target.python_type()

    def next(self, trace: Trace) -> Value | None:
        return trace.unless(StopIteration, trace.call_special, self.target, "__next__", [], {})


class _Indexed:
    def __getitem__(self, index: int) -> int:
        raise IndexError


class IndexIterator(Iterator):
    """Steps an object that has only `__getitem__`."""

    __slots__ = ("target", "index")
    kind = type(iter(_Indexed()))

    def __init__(self, target: Value) -> None:
        super().__init__()
        self.target, self.index = target, 0

    def next(self, trace: Trace) -> Value | None:
        at = trace.make(self.index)
        item = trace.unless((IndexError, StopIteration), self.target.getitem, trace, at)
        self.index += item is not None
        return item


# From Python objects to values ------------------------------------------------------------------------------
# A wrap rule makes the value of an object read from outside: (trace, source, obj) -> Value. It installs the
# guards that the value's own content needs (type, constant, length); guards on objects reached through it
# come with later reads.
WrapRule = Callable[["Trace", "Source", Any], Value]
wrap_exact: Registry[type, WrapRule] = Registry("wrap")
wrap_base: list[tuple[type, WrapRule]] = []


def wrap_rule(*types: type, subclasses: bool = False) -> Callable[[WrapRule], WrapRule]:
    """Register the wrap rule of exact types, or of a base class with all its subclasses (the rule registered
    last wins; `object` comes last of all)."""

    def add(rule: WrapRule) -> WrapRule:
        for cls in types:
            if subclasses:
                wrap_base.insert(len(wrap_base) if cls is object else 0, (cls, rule))
            else:
                wrap_exact.add(cls, rule)
        return rule

    return add


def wrap_held(make: Callable[[Any, Source], Value], *types: type, subclasses: bool = False) -> None:
    """Objects of these types are known by identity; `make(obj, source)` makes their values."""

    @wrap_rule(*types, subclasses=subclasses)
    def wrap(trace: Trace, source: Source, obj: Any) -> Value:
        trace.reader.guard(IdIs(source, obj))
        return make(obj, source)


def wrap_typed(make: WrapRule, *types: type) -> None:
    """Objects of which the class is guarded, and later each attribute read."""

    @wrap_rule(*types)
    def wrap(trace: Trace, source: Source, obj: Any) -> Value:
        trace.reader.guard(TypeIs(source, type(obj)))
        return make(trace, source, obj)


# How `trace.fresh` makes the value of a new real container: type -> (trace, obj) -> Value.
makers: dict[type, Callable[[Trace, Any], Value]] = {}


# From callables to rules ------------------------------------------------------------------------------------
# A call rule runs a call of a known object (builtin function, C method descriptor, class, or Python function
# that is not to be inlined). It has the trace and the parameters of the object, by their names; method descriptors
# get the instance first.
CallRule = Callable[..., Value]
builtin_rules: dict[Any, CallRule] = {}
# What goes before when an argument is symbolic.
size_rules: dict[Any, CallRule] = {}
# What goes before when an argument takes over: (fn, its rule) -> rule.
override = Deferred[[Any, CallRule | None], CallRule | None]("override")
# The result of a call inside of regions of function modes: (trace, fn, args, kwargs) -> a value, or None: they are not
# asked.
under_modes = Deferred[["Trace", Any, list[Value], dict[str, Value]], Value | None]("under_modes")
# Finders answer for families of callables (all of torch.*, ...): obj -> rule or None; asked in order, answers
# memoised.
call_finders: list[Callable[[Any], CallRule | None]] = []


def builtin_rule(*callables: Any) -> Callable[[CallRule], CallRule]:
    """Register the rule of each callable (compared by identity or equality; must be hashable)."""

    def add(rule: CallRule) -> CallRule:
        for fn in callables:
            if fn in builtin_rules:
                raise KeyError(f"call rule for {fn!r} is registered twice")
            builtin_rules[fn] = rule
        return rule

    return add


def run_rule(
    trace: Trace, fn: Any, rule: Callable[..., Result], args: Iterable[Value], kwargs: Mapping[str, Value]
) -> Result:
    """`fn(*args, **kwargs)` by its rule. Arguments that the rule has no parameters for break the graph: eager takes
    them, or refuses them in its own words.
    """
    try:
        return rule(trace, *args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:  # raised in the rule
            raise
    name = fn if isinstance(fn, str) else getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    raise unsupported("unsupported-call", f"{name or repr(fn)}() is called with other arguments")


def calls_python(replacement: Callable[..., Any]) -> CallRule:
    """The rule that interprets one of our own functions (a polyfill) instead."""
    return lambda trace, /, *args, **kwargs: trace.call_python(replacement, [*args], kwargs)


def refusing(kind: str, what: str, cause: str = "", cure: str = "") -> CallRule:
    """The rule of what breaks the graph."""

    def rule(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
        raise unsupported(kind, what, cause, cure)

    return rule


def call_finder(finder: Callable[[Any], CallRule | None]) -> Callable[[Any], CallRule | None]:
    """Register a finder for a family of callables."""
    call_finders.append(finder)
    return finder


# Rules of Python functions of libraries that are not imported here, by module and qualified name: they get the
# function first. One that moves or changes its name is inlined like any other.
rules_by_name: dict[tuple[str | None, str], Callable[..., Value]] = {}


def named_rule(*paths: str) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """Register the rule of functions, each as "module:qualified name"."""

    def add(rule: Callable[..., Value]) -> Callable[..., Value]:
        rules_by_name.update(
            {(module, name): rule for module, _, name in (path.partition(":") for path in paths)}
        )
        return rule

    return add


@call_finder
def _find_named(fn: Callable[..., Any]) -> CallRule | None:
    rule = rules_by_name.get((fn.__module__, fn.__qualname__)) if type(fn) is types.FunctionType else None
    return None if rule is None else functools.partial(rule, fn)


# Python functions that no finder of this capture knows; empty between captures, since marks are set at any time.
functions_without_rule: set[types.FunctionType] = set()


# How a descriptor found on a class binds to an instance: type of the descriptor ->
# (trace, descriptor, name, instance, class) -> Value.
Binder = Callable[["Trace", Any, str, Value, type], Value]
binders: Registry[type, Binder] = Registry("binder")


def find_rule(fn: Callable[..., Any], args: Sequence[Value] = ()) -> CallRule | None:
    """The call rule of a real callable, or None. `args`: those of the call, where they are known."""
    try:
        rule = builtin_rules.get(fn)
        if fn in size_rules and any(a.symbolic for a in args):
            return size_rules[fn]
    except TypeError:
        return None
    if rule is None and fn not in functions_without_rule:
        for finder in call_finders:
            rule = finder(fn)
            if rule is not None:
                builtin_rules[fn] = rule
                break
        else:
            if type(fn) is types.FunctionType:
                functions_without_rule.add(fn)
    return override(fn, rule) if any(a.takes_over for a in args) else rule
