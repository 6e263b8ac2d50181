"""Changes of outside state by a trace: each changed object once, replayed after the graph with its final contents,
and deferred calls.

A value that can change knows how to write itself back (`replay(emitter)`); without such a rule the change breaks
the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from .breaks import unsupported, unsupported_if
from .guards import Distinct, runs_code_at_its_end
from .source import Source
from .values.base import Epoch, ResultEmitter, Trace, Value
from .values.containers import DictValue, ListValue, TupleValue
from .values.tensor import TensorValue, version


class Effects:
    """The changed outside values of a trace, in the order of their first change, and calls to make
    afterwards.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.touched: dict[Any, None] = {}
        self.standing: dict[type, Value] = {}  # effects of which a trace has one (values/context.py)
        self.touches: list[Any] = []  # each time anew
        self.oldest = math.inf  # epoch of the oldest traced object that was mutated
        self.settings: dict[
            Callable[..., Any], Value
        ] = {}  # what sets a state that differs now -> its argument
        self.calls: list[tuple[Value, list[Value], dict[str, Value]]] = []
        self.conditions: dict[int, Value] = {}  # bools under which calls are made, by their number
        self.shown: list[
            tuple[TensorValue, Any]
        ] = []  # tensors that deferred calls take, and their versions then

    def __bool__(self) -> bool:
        return bool(self.touched or self.settings or self.calls)

    @property
    def changes_objects(self) -> bool:
        """Whether an outside object looks different in the trace than it does for real."""
        return any(value.source is not None for value in self.touched)

    def touch(self, value: Any, ended: Iterable[Any] = ()) -> None:
        """Note that an outside object changed; `value.replay(emitter)` will write it back. Raises Unsupported where
        the end of one of the real objects that it may let go (`ended`) runs code.
        """
        for one in ended:
            unsupported_if(
                runs_code_at_its_end(one),
                "finalizer",
                f"an instance of {type(one).__qualname__} may be let go",
                "its finalizer runs code when the last reference goes",
            )
        self.touched[value] = None
        self.touches.append(value)

    def change(self, value: Any) -> None:
        """Note that an object changed which the trace itself has made."""
        self.oldest = min(self.oldest, value.born)

    def begin(self) -> tuple[int, float]:
        """Begin a part of the trace, for `changed_older`."""
        outer, self.oldest = self.oldest, math.inf
        Epoch.now += 1
        return Epoch.now, outer

    def changed_older(self, begun: tuple[int, float]) -> bool:
        """Whether the part that `begun` is of, and ends here, changed objects that the trace had made before it."""
        epoch, outer = begun
        inner, self.oldest = self.oldest, min(outer, self.oldest)
        return inner < epoch

    def later(
        self,
        fn: Value,
        receiver: list[Value],
        args: list[Value],
        kwargs: dict[str, Value],
        when: Value | None = None,
    ) -> None:
        """Make the call `fn(*receiver, *args, **kwargs)` after the graph (a log message, ...), if `when` is true
        then; its result is not used.

        The arguments are taken as they are now. Raises Unsupported for those that the program could change
        until then.
        """
        kept = [self._as_now(value) for value in args]
        if when is not None:
            self.conditions[len(self.calls)] = when
        self.calls.append(
            (fn, [*receiver, *kept], {name: self._as_now(value) for name, value in kwargs.items()})
        )

    def _as_now(self, value: Value) -> Value:
        if type(value) is TupleValue:
            return TupleValue([self._as_now(item) for item in value.items])
        if type(value) is ListValue:
            return ListValue([self._as_now(item) for item in value.items])
        if type(value) is DictValue:
            return DictValue(
                [(key, k, self._as_now(v)) for key, (k, v) in value.load().items()], kind=value.kind
            )
        if isinstance(value, TensorValue):
            self.shown.append((value, version(value.example)))
        elif not value.is_constant() and not issubclass(value.python_type(), BaseException):
            raise unsupported(
                "side-effect",
                f"a message shows {value.describe()}",
                "it may change until the message is written",
                cure="make the text before the call",
            )
        return value

    def guard_aliases(self) -> None:
        """A changed object must not be reachable as another one at the next call."""
        changed: dict[Any, list[Source]] = {}
        for value in self.touched:
            if value.source is not None and value.real() is not None:
                changed.setdefault((type(value), value.python_type()), []).append(value.source)
        if not changed:
            return
        others: dict[Any, list[Source]] = {kind: [] for kind in changed}
        for value in self.trace.reader.values.values():
            kind = type(value), value.python_type()
            if kind in changed and value.source is not None and value not in self.touched:
                others[kind].append(value.source)
        for kind, sources in changed.items():
            held = [source for source in sources if source.is_held]
            free = [source for source in sources if not source.is_held]
            self._guard_distinct(free, [*held, *others[kind]])
            self._guard_distinct(held, [source for source in others[kind] if not source.is_held])

    def _guard_distinct(self, changed: list[Source], others: list[Source]) -> None:
        if changed and len(changed) + len(others) > 1:
            self.trace.reader.guard(Distinct(changed[0], (*changed[1:], *others), len(changed)))

    def replay(self, emitter: ResultEmitter) -> bool:
        """Write the statements that redo every change; whether there are any."""
        before = len(emitter.lines)
        unsupported_if(
            any(version(value.example) != then for value, then in self.shown),
            "side-effect",
            "a tensor that a message shows, or a hook is put on, is written in place after it",
            cure="make the text, or put the hook on, outside of the compiled function",
        )
        for value in self.touched:
            emitter.replay(value)
        for setter, value in self.settings.items():
            emitter.statement(f"{emitter.constant(setter)}({emitter.emit(value)})")
        for number, (fn, args, kwargs) in enumerate(self.calls):
            words = [emitter.emit(a) for a in args] + [f"{k}={emitter.emit(v)}" for k, v in kwargs.items()]
            when = self.conditions.get(number)
            condition = "" if when is None else f"if {emitter.emit(when)}: "
            emitter.statement(f"{condition}{emitter.emit(fn)}({', '.join(words)})")
        return len(emitter.lines) > before
