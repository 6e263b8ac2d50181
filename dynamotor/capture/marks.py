"""`disable`: functions that are never captured; a call of one breaks the graph and runs as it is.

>>> @dynamotor.disable
... def log_stats(x): print(x.mean())
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

from .. import _C
from .breaks import unsupported
from .guards import IdIs
from .values.base import CallRule, Value, call_finder, wrap_rule
from .values.klass import Builtin

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_dynamotor_disabled"


def disable(fn: F) -> F:
    """Mark a function (or decorate it): compiled code calls it as it is, outside of any graph."""
    if isinstance(fn, types.FunctionType):
        fn.__dict__[_MARK] = True
        return fn

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)
    run.__dict__[_MARK] = True
    return run  # type: ignore[return-value]


def is_disabled(fn: Any) -> bool:
    """Whether `disable` marked the function."""
    return isinstance(fn, types.FunctionType) and (_MARK in fn.__dict__ or "_torchdynamo_disable" in fn.__dict__)


@call_finder
def _find_compiled(fn: Any) -> CallRule | None:
    """A callable that is itself compiled is captured as what it was."""
    if type(fn) is not _C.Dispatcher:
        return None
    return lambda trace, args, kwargs: trace.call(trace.make(fn.original), args, kwargs)


@call_finder
def _find_disabled(fn: Any) -> CallRule | None:
    if not is_disabled(fn):
        return None

    def rule(trace: Any, args: list[Value], kwargs: dict[str, Value]) -> Value:
        raise unsupported("disabled", f"{fn.__qualname__} is marked with dynamotor.disable")
    return rule


@wrap_rule(_C.Dispatcher)
def _wrap_compiled(trace: Any, source: Any, obj: Any) -> Value:
    trace.reader.guard(IdIs(source, obj))
    return Builtin(obj, source)
