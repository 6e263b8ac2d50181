"""Marks on functions: never captured (`disable`), a node of the graph as they are (`allow_in_graph`),
constant.

>>> @dynamotor.disable
... def log_stats(x): print(x.mean())
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from .. import _C
from ..base.compat import tree_leaves, tree_map
from .guards import IdIs
from .source import Source, trusted_module
from .stance import RUN, set_stance
from .values.base import (
    CallRule,
    Trace,
    Value,
    binders,
    builtin_rule,
    builtin_rules,
    call_finder,
    refusing,
    wrap_rule,
)
from .values.constant import Constant
from .values.function import BoundMethod
from .values.klass import Builtin
from .values.known_data import now
from .values.torch_function import graph_function

F = TypeVar("F", bound=Callable[..., Any])
Marked = TypeVar("Marked", bound=Callable[..., Any] | list[Any] | tuple[Any, ...])
_MARK = "_dynamotor_disabled"


class _Disable:
    """`disable()` without a function: a decorator, and a `with` block in which nothing compiled runs."""

    def __init__(self, recursive: bool) -> None:
        self.recursive = recursive

    def __call__(self, fn: F) -> F:
        if isinstance(fn, types.FunctionType):
            fn.__dict__[_MARK] = self.recursive
            builtin_rules.pop(fn, None)
            return fn
        if isinstance(fn, torch.nn.Module):  # which stays a module: its call alone is left to eager
            fn.__dict__[_MARK] = self.recursive
            return fn
        if isinstance(fn, type):
            if instances_are_called(fn):
                type.__setattr__(fn, "__call__", self(plain_function(fn.__call__)))
            else:
                builtin_rules[fn] = _refusing(fn, "dynamotor.disable")
            return fn

        run = plain_function(fn)
        run.__dict__[_MARK] = self.recursive
        return run  # type: ignore[return-value]

    def __enter__(self) -> None:
        self.stance = set_stance("force_eager")

    def __exit__(self, *error: object) -> None:
        self.stance.__exit__(*error)


def instances_are_called(cls: type) -> bool:
    """Whether a class defines calls of its instances."""
    return any("__call__" in vars(base) for base in cls.__mro__)


def plain_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same as a function of its own, so that a mark is not one of what others call, too."""

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return call


@overload
def disable(fn: F, *, recursive: bool = True) -> F: ...
@overload
def disable(fn: None = None, *, recursive: bool = True) -> _Disable: ...


def disable(fn: Any = None, *, recursive: bool = True) -> Any:
    """Mark a function, a module or the instances of a class: compiled code calls it as it is, outside of any
    graph. Also a decorator, with and without a call, and without a function a context manager.

    recursive: its callees run as they are too; False: functions that it calls are captured on their own.
    """
    return _Disable(recursive) if fn is None else _Disable(recursive)(fn)


def is_disabled(fn: Callable[..., Any]) -> bool:
    """Whether `disable` (or torch.compiler's) marked the function."""
    return isinstance(fn, types.FunctionType) and (
        _MARK in fn.__dict__ or "_torchdynamo_disable" in fn.__dict__
    )


def disables_calls(fn: types.FunctionType) -> bool:
    """Whether a disabled function's calls are not captured either."""
    return fn.__dict__.get(_MARK, fn.__dict__.get("_torchdynamo_disable_recursive", True))


def allow_in_graph(fn: Marked) -> Marked:
    """Make calls of a function one node of the graph each, without looking inside: it computes with tensors
    and has no other effect. Its Python runs when the graph is made. A function, or several in a list or
    tuple; also a decorator."""
    for each in fn if isinstance(fn, list | tuple) else [fn]:
        builtin_rules[each] = functools.partial(graph_function, each)
    return fn


def disallow_in_graph(fn: Marked) -> Marked:
    """Break the graph at calls of a function (one of torch's, too). A function, or several; also a
    decorator.
    """
    for each in fn if isinstance(fn, list | tuple) else [fn]:
        builtin_rules[each] = _refusing(each, "dynamotor.disallow_in_graph")
    return fn


def assume_constant_result(fn: F) -> F:
    """Call a function when the graph is made, with what its arguments are then, and take its result as a
    constant from then on (of tensors that it gives back, a copy).
    """
    fn.__dict__["_dynamo_marked_constant"] = True
    builtin_rules.pop(fn, None)
    return fn


@overload
def nested_compile_region(fn: F, **options: Any) -> F: ...
@overload
def nested_compile_region(fn: None = None, **options: Any) -> Callable[[F], F]: ...


def nested_compile_region(fn: Any = None, **options: Any) -> Any:
    """For programs written for torch.compile, which compiles a region that is marked so once for all its
    calls. Here the function is captured like any other, and kernels that are equal are one function already.
    A decorator, with and without a call."""
    return (lambda function: function) if fn is None else fn


def is_compiling() -> bool:
    """Whether the call is part of a graph: True in captured code, False when it runs."""
    return False


builtin_rule(is_compiling)(lambda trace: Constant(True))


def _call_constant(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    given = [now(trace, a) for a in args], {name: now(trace, v) for name, v in kwargs.items()}
    tensors = {id(leaf) for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)}
    result = fn(*given[0], **given[1])
    return trace.make(tree_map(lambda x: x.clone() if id(x) in tensors else x, result))


@call_finder
def _find_constant(fn: Callable[..., Any]) -> CallRule | None:
    is_marked = isinstance(fn, types.FunctionType) and fn.__dict__.get("_dynamo_marked_constant")
    return functools.partial(_call_constant, fn) if is_marked else None


def is_allowed(fn: Callable[..., Any]) -> bool:
    """Whether `torch.compiler.allow_in_graph` marked a function or a class."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return rules is not None and rules.is_callable_allowed(fn)


@call_finder
def _find_allowed(fn: Callable[..., Any]) -> CallRule | None:
    """What `torch.compiler.allow_in_graph` or `torch._dynamo.disallow_in_graph` marked."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None or not isinstance(fn, types.FunctionType) or trusted_module(fn.__module__):
        return None
    if rules.is_callable_disallowed(fn):
        return _refusing(fn, "torch._dynamo.disallow_in_graph")
    return functools.partial(graph_function, fn) if rules.is_callable_allowed(fn) else None


def _refusing(fn: Callable[..., Any], mark: str) -> CallRule:
    return refusing("disabled", f"{getattr(fn, '__qualname__', fn)} is marked with {mark}")


@call_finder
def _find_compiled(fn: Callable[..., Any]) -> CallRule | None:
    """A callable that is itself compiled is captured as its original."""
    if type(fn) is not _C.Dispatcher:
        return None
    return lambda trace, /, *args, **kwargs: trace.call(trace.make(fn.original), [*args], kwargs)


@call_finder
def _find_wrapped(fn: Callable[..., Any]) -> CallRule | None:
    """What `torch.compile`, `torch.compiler.nested_compile_region` or `run` made is captured as its original."""
    if not isinstance(fn, types.FunctionType) or is_disabled(fn):
        return None
    if fn.__code__ is RUN:
        (cell,) = fn.__closure__ or ()
        return _calls_instead(cell.cell_contents)
    made = fn.__globals__.get("__name__") == "torch._dynamo.eval_frame"  # `functools.wraps` copies marks
    mark = "_torchdynamo_orig_callable" if made else "__marked_compile_region_fn__"
    inner = fn.__dict__.get(mark)
    if inner is None:
        return None
    return _calls_instead(inner)


def _calls_instead(original: Any) -> CallRule:
    return lambda trace, /, *args, **kwargs: trace.tail_call(trace.make(original), [*args], kwargs)


@call_finder
def _find_disabled(fn: Any) -> CallRule | None:
    if not is_disabled(fn):
        return None
    if disables_calls(fn):
        return _refusing(fn, "dynamotor.disable")
    inner = fn.__dict__.get("_torchdynamo_orig_callable")
    if inner is not None:
        disable(inner, recursive=False)
    return refusing(
        "unsupported-call", f"{fn.__qualname__} is marked with dynamotor.disable(recursive=False)"
    )


@binders.register(_C.Dispatcher)
def _bind_compiled(trace: Trace, raw: Any, name: str, instance: Value, cls: type) -> Value:
    return BoundMethod(trace.make(raw.original), instance)


class CompiledValue(Builtin):
    """A compiled callable. Attributes that are not its own are those of its original (csrc/dispatch.c)."""

    __slots__ = ()

    def _place(self, trace: Trace, name: str) -> Value | None:
        is_own = name.startswith("__") or name in vars(self.value) or hasattr(_C.Dispatcher, name)
        return None if is_own else trace.make(self.value.original)

    def getattr(self, trace: Trace, name: str) -> Value:
        place = self._place(trace, name)
        return super().getattr(trace, name) if place is None else place.getattr(trace, name)

    def setattr(self, trace: Trace, name: str, value: Value) -> None:
        place = self._place(trace, name)
        if place is None:
            super().setattr(trace, name, value)
        else:
            place.setattr(trace, name, value)

    def delattr(self, trace: Trace, name: str) -> None:
        place = self._place(trace, name)
        if place is None:
            super().delattr(trace, name)
        else:
            place.delattr(trace, name)


@wrap_rule(_C.Dispatcher)
def _wrap_compiled(trace: Trace, source: Source, obj: Any) -> Value:
    trace.reader.guard(IdIs(source, obj))
    return CompiledValue(obj, source)
