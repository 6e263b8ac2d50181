"""Python functions, their cells, bound methods and partials.

A function from outside is guarded by identity where its place is held (class, module), by its code where it
is an argument.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from ...base.narrowing import checked
from ..breaks import unsupported
from ..bytecode import by_code
from ..guards import Absent, IdIs, TypeIs
from ..source import (
    Const,
    SeqItem,
    SlotOf,
    Source,
    trusted_module,
)
from .arguments import fitted
from .base import (
    MISSING,
    CallRule,
    Epoch,
    Raised,
    ResultEmitter,
    Trace,
    Value,
    find_rule,
    run_rule,
    under_modes,
    wrap_rule,
    wrap_typed,
)
from .constant import Constant, is_none
from .containers import DictValue, TupleValue

_NAMES = (
    "__name__",
    "__qualname__",
    "__module__",
    "__doc__",
    "__annotations__",
    "__annotate__",
    "__type_params__",
)


class CellValue(Value):
    """A closure cell; `contents` is MISSING until read, None when empty."""

    __slots__ = ("contents", "obj", "born", "settled")
    kind = types.CellType

    def __init__(
        self, contents: Any = None, source: Source | None = None, obj: Any = MISSING, settled: bool = False
    ) -> None:
        """settled: whether no code sets it again once it has contents."""
        self.source, self.contents, self.obj, self.settled = source, contents, obj, settled
        self.born = Epoch.now

    def load(self, trace: Trace) -> Value | None:
        """The contents, or None when the cell is empty."""
        if self.contents is MISSING:
            source = SlotOf(self.source, "cell_contents")
            try:
                found = self.obj.cell_contents
            except ValueError:
                self.contents = None
                trace.reader.guard(Absent(source))
            else:
                self.contents = trace.wrap(source, found)
        return self.contents

    def store(self, trace: Trace, value: Value | None) -> None:
        """Set (None: empty) the cell."""
        self.contents = value
        if self.obj is not MISSING:
            trace.effects.touch(self)
        else:
            trace.effects.change(self)

    def getattr(self, trace: Trace, name: str) -> Value:
        if name == "cell_contents":
            found = self.load(trace)
            if found is None:
                raise trace.error(ValueError, "Cell is empty")
            return found
        return super().getattr(trace, name)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        name = self.bare(emitter)
        self.fill(emitter)
        return name

    def bare(self, emitter: ResultEmitter) -> str:
        """The cell, one made in the trace still without contents."""
        if self.source is not None or id(self) in emitter.names:
            return emitter.emit(self)
        emitter.unfilled.add(id(self))
        return emitter.new_object(self, f"{emitter.constant(types.CellType)}()")

    def fill(self, emitter: ResultEmitter) -> None:
        """Give a bare cell its contents."""
        if id(self) in emitter.unfilled:
            emitter.unfilled.discard(id(self))
            if self.contents is not None:
                emitter.statement(f"{emitter.emit(self)}.cell_contents = {emitter.emit(self.contents)}")

    def replay(self, emitter: ResultEmitter) -> None:
        """Give the outside cell its final contents."""
        name = emitter.emit(self)
        emitter.statement(
            f"{name}.cell_contents = {emitter.emit(self.contents)}"
            if self.contents is not None
            else f"del {name}.cell_contents"
        )


wrap_typed(lambda trace, source, obj: CellValue(MISSING, source, obj), types.CellType)


# Rules of library functions of which there are many, made inside of others: by the id of their code.
code_rules: dict[int, CallRule] = {}


def code_rule(code: types.CodeType) -> Callable[[CallRule], CallRule]:
    """Register the rule of all functions with this code, which lives as long as the process; it gets the function
    first."""

    def add(rule: CallRule) -> CallRule:
        code_rules[id(code)] = rule
        return rule

    return add


class FunctionValue(Value):
    """A Python function: `fn` is the real one (from outside), or MISSING for one made in the trace."""

    __slots__ = (
        "fn",
        "code",
        "trusted",
        "_globals",
        "_defaults",
        "_kwdefaults",
        "_closure",
        "special",
        "_dict",
        "trace",
    )
    kind = types.FunctionType

    def __init__(
        self,
        trace: Trace,
        code: types.CodeType,
        *,
        fn: Any = MISSING,
        source: Source | None = None,
        globals_: DictValue | None = None,
        defaults: list[Value] | None = None,
        kwdefaults: dict[str, Value] | None = None,
        closure: list[CellValue] | None = None,
        name: str | None = None,
    ) -> None:
        self.source, self.trace, self.fn, self.code = source, trace, fn, code
        self.trusted = (
            fn is not MISSING and (source is None or type(source) is Const) and trusted_function(fn)
        )
        self._globals, self._defaults, self._kwdefaults, self._closure = (
            globals_,
            defaults,
            kwdefaults,
            closure,
        )
        self.special: dict[str, Value] = {}
        self._dict: DictValue | None = None
        if fn is MISSING:
            self.special["__qualname__"] = Constant(name or code.co_qualname)
            self.special["__name__"] = Constant(code.co_name)
            self._dict = DictValue([])
            self._dict.born, self._dict.owner = 0, weakref.ref(self)  # as old as can be

    def is_constant(self) -> bool:
        return self.fn is not MISSING

    def as_constant(self) -> Any:
        return super().as_constant() if self.fn is MISSING else self.fn

    def real(self) -> Any:
        return self.fn

    def hash_key(self, trace: Trace) -> Hashable:
        return self if self.fn is MISSING else self.fn

    @property
    def globals(self) -> DictValue:
        """The module's dict, shared by all functions of the module."""
        if self._globals is None:
            self._globals = globals_of(self.trace, self.fn.__globals__)
        return self._globals

    @property
    def closure(self) -> list[CellValue]:
        """The cells of the free variables, in order."""
        if self._closure is None:
            self._closure = []
            for i, cell in enumerate(self.fn.__closure__ or ()):
                known = self.trace.reader.values.get(id(cell))
                if known is None:
                    base = self.source if self.source is not None else Const(self.fn, self.fn.__qualname__)
                    known = CellValue(MISSING, SeqItem(SlotOf(base, "__closure__"), i), cell)
                    self.trace.reader.adopt(cell, known)
                self._closure.append(checked(CellValue, known))
        return self._closure

    def _slot(self, name: str) -> Value:
        """A guarded slot of a real function as a value."""
        found = getattr(self.fn, name)
        return self.trace.make(found) if self.trusted else self.trace.wrap(SlotOf(self.source, name), found)

    @property
    def defaults(self) -> list[Value]:
        if self._defaults is None:
            value = self._slot("__defaults__")
            self._defaults = [] if isinstance(value, Constant) else value.unpack(self.trace)
        return self._defaults

    @property
    def kwdefaults(self) -> dict[str, Value]:
        if self._kwdefaults is not None:
            return self._kwdefaults
        if self.fn is MISSING:
            return {}
        value = self._slot("__kwdefaults__")  # a dict that the program may have written just now
        return {k.as_constant(): v for k, v in value.load().values()} if isinstance(value, DictValue) else {}

    @property
    def dict(self) -> DictValue:
        """The function's own attributes."""
        if self._dict is None:
            value = self._slot("__dict__")
            assert isinstance(value, DictValue)
            value.trusted = self.trusted
            self._dict = value
        return self._dict

    def getattr(self, trace: Trace, name: str) -> Value:
        if name in self.special:
            return self.special[name]
        if name in _NAMES:
            if self.trusted:  # those of a library's are constant
                return trace.make(getattr(self.fn, name, None))
            if self.fn is not MISSING:
                return trace.attribute_now(self.source, self.fn, name)
            if name == "__module__":
                return self.globals.lookup("__name__") or Constant(None)
            if name == "__doc__":
                cells = tuple(types.CellType() for _ in self.code.co_freevars)
                return Constant(types.FunctionType(self.code, {}, closure=cells).__doc__)
            if name == "__annotations__":
                return self._annotations(trace)
            return TupleValue([]) if name == "__type_params__" else Constant(None)
        if name == "__dict__":
            return self.dict
        if name == "__code__":
            return trace.make(self.code)
        if name == "__globals__":
            return self.globals
        if name in ("__defaults__", "__kwdefaults__") and self.fn is not MISSING:
            return self._slot(name)
        if name == "__defaults__":
            return TupleValue(self.defaults) if self.defaults else Constant(None)
        if name == "__kwdefaults__":
            if self.kwdefaults:
                raise unsupported(
                    "unsupported-value", f"__kwdefaults__ of {self.describe()} made inside is read"
                )
            return Constant(None)
        if name == "__closure__":
            return TupleValue(self.closure) if self.closure else Constant(None)
        return self.dict.lookup(name) or super().getattr(trace, name)

    def _annotations(self, trace: Trace) -> Value:
        """Those of a function made here, which 3.14 computes when they are asked for (format 1: as values)."""
        found = self.special["__annotations__"] = (
            trace.call(self.special["__annotate__"], [Constant(1)]) if self._is_lazy else DictValue([])
        )
        return found

    @property
    def _is_lazy(self) -> bool:
        return "__annotate__" in self.special and not is_none(self.special["__annotate__"])

    def instance_attr(self, trace: Trace, name: str) -> Value | None:
        return self.dict.lookup(name)

    def setattr(self, trace: Trace, name: str, value: Value) -> None:
        if name in _NAMES and self.fn is MISSING:
            self.special[name] = value
            if name == "__annotate__":
                self.special.pop("__annotations__", None)
            elif name == "__annotations__" and "__annotate__" in self.special:
                self.special["__annotate__"] = Constant(None)
        elif name.startswith("__") and hasattr(types.FunctionType, name):
            raise unsupported("unsupported-mutation", f"{name} of {self.describe()} is set")
        else:
            self.dict.store(trace, name, Constant(name), value)

    def delattr(self, trace: Trace, name: str) -> None:
        trace.raise_if(self.dict.lookup(name) is None, AttributeError, name)
        self.dict.remove(trace, name)

    # `dict` is an attribute here.
    def call(self, trace: Trace, args: list[Value], kwargs: Any) -> Value:
        by_code = code_rules.get(id(self.code))
        if by_code is not None:
            trace.tail = False
            return run_rule(trace, self.code.co_qualname, by_code, (self, *args), kwargs)
        if self.fn is not MISSING:
            found = under_modes(trace, self.fn, args, kwargs) if trace.calls.modes else None
            if found is not None:
                return found
            rule = find_rule(self.fn, args)
            if rule is not None:
                trace.tail = False  # a rule goes on with the result of its call
                return run_rule(trace, self.fn, rule, *fitted(self.fn, args, kwargs))
        return trace.inline(self, args, kwargs)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        if self.fn is not MISSING:
            return emitter.constant(self.fn)
        closure = "".join(f"{cell.bare(emitter)}, " for cell in self.closure)
        defaults = "".join(f"{emitter.emit(v)}, " for v in self.defaults)
        name = emitter.new_object(
            self,
            f"{emitter.constant(types.FunctionType)}({emitter.constant(self.code)}, {emitter.emit(self.globals)}, "
            f"{self.special['__name__'].as_constant()!r}, ({defaults}) or None, ({closure}) or None)",
        )
        if self.kwdefaults:
            emitter.statement(
                f"{name}.__kwdefaults__ = {{{', '.join([f'{k!r}: {emitter.emit(v)}' for k, v in self.kwdefaults.items()])}}}"
            )
        for attr, value in self.special.items():
            if attr != "__name__" and not (attr == "__annotations__" and self._is_lazy):
                emitter.statement(f"{name}.{attr} = {emitter.emit(value)}")
        for _, (key, value) in self.dict.load().items():
            emitter.statement(f"{name}.__dict__[{emitter.emit(key)}] = {emitter.emit(value)}")
        for cell in self.closure:  # which may hold this very function
            cell.fill(emitter)
        return name

    def describe(self) -> str:
        return f"function {self.code.co_qualname}"


def trusted_function(fn: types.FunctionType) -> bool:
    """Whether a function's code, defaults and globals are taken as constant."""
    return trusted_module(fn.__globals__.get("__name__")) and "torch.nn.modules" not in (fn.__module__ or "")


def globals_of(trace: Trace, namespace: dict[str, Any]) -> DictValue:
    """The value of a module's dict."""
    known = trace.reader.values.get(id(namespace))
    if isinstance(known, DictValue):
        return known
    name = namespace.get("__name__")
    value = DictValue(
        None, Const(namespace, f"{name}.__dict__"), namespace, trace, trusted=trusted_module(name)
    )
    trace.reader.adopt(namespace, value)
    return value


@wrap_rule(types.FunctionType)
def _wrap_function(trace: Trace, source: Source, fn: types.FunctionType) -> Value:
    value = FunctionValue(trace, fn.__code__, fn=fn, source=source)
    if not value.trusted:
        guard = trace.reader.guard
        if source.is_held and fn.__closure__ is None:
            guard(IdIs(source, fn))
        else:  # a new one of the same code may come, as `context_parallel` puts one in each time
            guard(TypeIs(source, types.FunctionType))
            guard(IdIs(SlotOf(source, "__globals__"), fn.__globals__))
        guard(IdIs(SlotOf(source, "__code__"), fn.__code__))
    return value


class BoundMethod(Value):
    """A Python function (or any callable) bound to an instance."""

    __slots__ = ("func", "instance")
    kind = types.MethodType

    def __init__(self, func: Value, instance: Value, source: Source | None = None) -> None:
        self.source, self.func, self.instance = source, func, instance

    def is_constant(self) -> bool:
        return self.instance.is_constant() and self.func.is_constant()

    def as_constant(self) -> Any:
        return self._made_by()(self.func.as_constant(), self.instance.as_constant())

    def hash_key(self, trace: Trace) -> Hashable:
        return ("method", self.func.hash_key(trace), self.instance.hash_key(trace))

    def getattr(self, trace: Trace, name: str) -> Value:
        if name == "__self__":
            return self.instance
        return self.func if name == "__func__" else self.func.getattr(trace, name)

    def binary(self, trace: Trace, op: Any, other: Value, reflected: bool = False) -> Value | None:
        if isinstance(other, BoundMethod) and op.__name__ in ("eq", "ne"):
            equal = trace.same(self.func, other.func) and trace.same(self.instance, other.instance)
            return Constant(equal == (op.__name__ == "eq"))
        return None

    def call(self, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
        return trace.tail_call(self.func, [self.instance, *args], kwargs)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return (
            f"{emitter.constant(self._made_by())}({emitter.emit(self.func)}, {emitter.emit(self.instance)})"
        )

    def _made_by(self) -> Callable[[Any, Any], types.MethodType]:
        can_be_called = any("__call__" in vars(base) for base in self.func.python_type().__mro__)
        return types.MethodType if can_be_called else _bound_uncallable

    def describe(self) -> str:
        return f"method {self.func.describe()}"


def _bound_uncallable(func: Callable[..., Any], cls: type) -> types.MethodType:
    """As a classmethod binds it, since 3.13 without a look at it."""
    return classmethod(func).__get__(None, cls)  # type: ignore[return-value]  # typeshed: a callable


wrap_typed(
    lambda trace, source, obj: BoundMethod(
        trace.wrap(SlotOf(source, "__func__"), obj.__func__),
        trace.wrap(SlotOf(source, "__self__"), obj.__self__),
        source,
    ),
    types.MethodType,
)


def keywords_of(named: Mapping[str, Value]) -> DictValue:
    """A new dict of keyword arguments."""
    return DictValue([(name, Constant(name), value) for name, value in named.items()])


def _locals() -> dict[str, Any]:
    return locals()


@by_code
def _binder(code: types.CodeType) -> types.FunctionType:
    """A function with the parameters of a code, none of which must be given, that says what CPython binds them to."""
    star = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    n_named = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[: n_named + star.bit_count()]
    bare = _locals.__code__.replace(
        co_argcount=code.co_argcount,
        co_posonlyargcount=code.co_posonlyargcount,
        co_kwonlyargcount=code.co_kwonlyargcount,
        co_nlocals=len(names),
        co_varnames=names,
        co_flags=_locals.__code__.co_flags | star,
    )
    binder = types.FunctionType(bare, {}, code.co_name, (MISSING,) * code.co_argcount)
    binder.__kwdefaults__ = dict.fromkeys(names[code.co_argcount : n_named], MISSING)
    return binder


def bind_arguments(
    trace: Trace, func: FunctionValue, args: list[Value], kwargs: dict[str, Value]
) -> list[Any]:
    """The initial fast locals of a call, in the order of `co_varnames`; wrong calls raise the program's
    TypeError.
    """
    code = func.code
    n, n_named = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    try:
        slots = list(_binder(code)(*args, **kwargs).values())
    except TypeError:
        raise _misfit(trace, func, args, kwargs) from None
    absent = [i for i in range(n_named) if slots[i] is MISSING]
    if absent:
        defaults = dict(enumerate(func.defaults, n - len(func.defaults))) if absent[0] < n else {}
        if absent[-1] >= n:
            named = func.kwdefaults
            words = {i: code.co_varnames[i] for i in range(n, n_named)}
            defaults |= {i: named[word] for i, word in words.items() if word in named}
        if not defaults.keys() >= {*absent}:
            raise _misfit(trace, func, args, kwargs)
        for i in absent:
            slots[i] = defaults[i]
    rest = [TupleValue(x) if type(x) is tuple else keywords_of(x) for x in slots[n_named:]]
    return slots[:n_named] + rest


def _misfit(trace: Trace, func: FunctionValue, args: list[Value], kwargs: dict[str, Value]) -> Raised:
    """What CPython says of a call that does not fit a function with such parameters and so many defaults."""
    like = types.FunctionType(_binder(func.code).__code__, {}, "", (None,) * len(func.defaults))
    like.__kwdefaults__ = dict.fromkeys(func.kwdefaults)
    like.__qualname__ = func.getattr(trace, "__qualname__").as_constant()  # as it is called now
    try:
        like(*args, **kwargs)
    except TypeError as error:
        return trace.real_error(error)
    raise AssertionError(f"a call of {func.describe()} fits")
