"""Context variables in a trace: `set` and `reset` are replayed behind the graph, in their order.

A token that is still needed behind a graph break is the one that the replayed `set` returns, so that `reset` and
`old_value` work there as in eager.
"""

from __future__ import annotations

import contextvars
import operator
from collections.abc import Hashable
from typing import Any

from .breaks import unsupported_if
from .guards import IdIs
from .source import Attr, Called, Const, Source
from .values.base import (
    MISSING,
    ResultEmitter,
    Trace,
    Value,
    builtin_rule,
    wrap_held,
    wrap_typed,
)
from .values.constant import Constant
from .values.context import Standing
from .values.klass import Builtin

wrap_held(Builtin, contextvars.ContextVar)

_UNSET = contextvars.Token.MISSING
_VALUE = operator.methodcaller("get", MISSING)


class TokenValue(Value):
    """A token: of a `set` in the trace (`new` is the value that was set), or from outside (`obj`)."""

    __slots__ = ("var", "new", "before", "used", "obj")
    kind = contextvars.Token

    def __init__(
        self,
        var: Any,
        new: Any = MISSING,
        before: Any = MISSING,
        source: Source | None = None,
        obj: Any = MISSING,
    ) -> None:
        super().__init__(source)
        self.var, self.new, self.before, self.obj, self.used = var, new, before, obj, False

    def old_value(self, trace: Trace) -> Any:
        """The variable's value before the `set`; MISSING where it had none."""
        if self.source is None:
            return self.before
        source, old = Attr(self.source, "old_value"), self.obj.old_value
        if old is not _UNSET:
            return trace.wrap(source, old)
        trace.reader.guard(IdIs(source, old))
        return MISSING

    def getattr(self, trace: Trace, name: str) -> Value:
        if name == "var":
            return trace.make(self.var)
        if name == "old_value":
            old = self.old_value(trace)
            return trace.make(_UNSET) if old is MISSING else old
        return super().getattr(trace, name)

    def hash_key(self, trace: Trace) -> Hashable:
        return self

    def reconstruct(self, emitter: ResultEmitter) -> str:
        writes = ContextWrites.known(emitter.trace)
        unsupported_if(
            self.used or writes is None, "reconstruct", "a token that was used leaves the captured region"
        )
        emitter.replay(writes)
        return emitter.names[id(self)]


def _token(trace: Trace, source: Source, obj: Any) -> Value:
    var = Attr(source, "var")
    trace.reader.guard(IdIs(var, obj.var))
    return TokenValue(obj.var, source=source, obj=obj)


wrap_typed(_token, contextvars.Token)


class ContextWrites(Standing):
    """The calls of `set` (reset is False) and `reset` that a trace makes, those apart that undo each other."""

    __slots__ = ("calls",)

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.calls: list[tuple[TokenValue, bool]] = []

    def set(self, token: TokenValue) -> None:
        """A variable was set."""
        self.calls.append((token, False))

    def reset(self, token: TokenValue) -> None:
        """A variable was reset by a token."""
        if self.calls and self.calls[-1] == (token, False):
            self.calls.pop()
        else:
            self.calls.append((token, True))

    def replay(self, emitter: ResultEmitter) -> None:
        for token, reset in self.calls:
            if reset:
                emitter.statement(f"{emitter.constant(token.var)}.reset({emitter.emit(token)})")
            else:
                emitter.remember(
                    token, emitter.bound(f"{emitter.constant(token.var)}.set({emitter.emit(token.new)})")
                )


def _read(trace: Trace, var: Any) -> Any:
    """The variable's value: from the trace, else the real one; MISSING where it has none."""
    writes = ContextWrites.known(trace)
    for token, reset in reversed(writes.calls if writes is not None else ()):
        if token.var is var:
            return token.old_value(trace) if reset else token.new
    source, found = Called(Const(var, f"contextvar {var.name}"), _VALUE), _VALUE(var)
    if found is not MISSING:
        return trace.wrap(source, found)
    trace.reader.guard(IdIs(source, MISSING))
    return MISSING


@builtin_rule(contextvars.ContextVar.get)
def _get(trace: Trace, var: Value, default: Value | None = None) -> Value:
    found = _read(trace, var.as_constant())
    if found is not MISSING:
        return found
    empty = contextvars.Context()  # in which the variable has its default
    return trace.real_call(empty.run, var.as_constant().get) if default is None else default


@builtin_rule(contextvars.ContextVar.set)
def _set(trace: Trace, var: Value, value: Value) -> Value:
    real = var.as_constant()
    token = TokenValue(real, value, _read(trace, real))
    ContextWrites.of(trace).set(token)
    return token


@builtin_rule(contextvars.ContextVar.reset)
def _reset(trace: Trace, var: Value, token: Value) -> Value:
    refused = not isinstance(token, TokenValue) or token.used or token.var is not var.as_constant()
    unsupported_if(refused, "unsupported-call", "a context variable refuses a token")
    assert isinstance(token, TokenValue)
    token.used = True
    ContextWrites.of(trace).reset(token)
    return Constant(None)
