"""One trace, composed of parts: the stack of inlined frames, symbolic sizes, the graph, the reader, effects, checks,
and tables of facts. It makes the calls between values.

Calls between values go through `trace.call` (the caller goes on working with the result) or `trace.tail_call`
(the caller returns the result as it is). Only a tail call can be resumed when the graph breaks inside; a
break inside any other call moves out to the instruction that started it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch.autograd import forward_ad

from .breaks import OfTrace, unsupported_if
from .call_stack import CallStack
from .checkpoint_reads import CHECKPOINT, FUNCTION, StateReads
from .checks import Checks
from .effects import Effects
from .graph_builder import GraphBuilder
from .guards import ConstEquals
from .interpreter import inline
from .late_code import LateCode
from .protocol import ObjectProtocol
from .reader import Reader
from .source import Called, Const, DictItem, Source
from .symbolic_inputs import SizePolicy, TraceSizes
from .trace_tables import ModuleTable, NumberTable, ObjectTable, TensorTable, TorchCalls
from .values import instances, lazy_text, string
from .values.base import Raised, Value, makers
from .values.constant import Constant
from .values.containers import TupleValue
from .values.function import FunctionValue

_NONE: Mapping[Source, Any] = {}
_NO_NAMES: Mapping[str, Value] = {}
# Constants whose values need no identity: made again freely.
PLAIN = frozenset(
    (int, float, bool, str, bytes, complex, type(None), type(Ellipsis), type(NotImplemented), range)
)


def _handled(_: object) -> BaseException | None:
    return sys.exception()


class Trace(ObjectProtocol):
    """The state of one symbolic run, in parts. `break_at` is the instruction count at which to stop (see
    frontend.py); handling: whether the caller is handling an exception.
    """

    reader: Reader
    effects: Effects

    def __init__(
        self,
        *,
        break_at: int | None = None,
        max_steps: int = 3_000_000,
        policy: SizePolicy | None = None,
        fixed: Mapping[Source, Any] = _NONE,
        handling: bool = False,
    ) -> None:
        super().__init__()
        self.stack = CallStack(break_at, max_steps, handling)
        self.sizes = TraceSizes(policy or SizePolicy(dynamic=False), self.stack.where, fixed)
        self.graph = GraphBuilder(self.stack.user_line)
        self.reader = Reader(self)
        self.late_code = LateCode()
        self.effects = Effects(self)
        self.checks = Checks(self)
        self.checkpoint_reads, self.function_reads = StateReads(self, CHECKPOINT), StateReads(self, FUNCTION)
        self.tensors, self.numbers, self.modules = TensorTable(), NumberTable(), ModuleTable()
        self.objects, self.calls = ObjectTable(), TorchCalls()
        # True between an instruction's call and the inlining that it directly stands for (see module
        # docstring).
        self.tail = False
        # Tangents of forward-mode differentiation hang on tensors without a trace in their dispatch keys.
        self.reader.guard(
            ConstEquals(DictItem(Const(vars(forward_ad), "torch.autograd.forward_ad"), "_current_level"), -1)
        )

    # Values -------------------------------------------------------------------------------------------------
    def wrap(self, source: Source, obj: Any) -> Value:
        """The value of an object read from outside; installs the guards of the read. One object is one
        value.
        """
        return self.reader.wrap(source, obj)

    def make(self, obj: Any) -> Value:
        """The value of a real result computed at trace time: plain constants, or an object that the entry
        holds (functions, classes, containers of the library, ...)."""
        if type(obj) in PLAIN:
            return Constant(obj)
        known = self.reader.values.get(id(obj))
        if known is not None and type(known.source) is Const:
            return known
        return self.reader.wrap(Const(obj, _label(obj)), obj)

    def fresh(self, obj: Any) -> Value:
        """Like `make`, for a result without other references: lists, dicts and sets become ones made in the
        trace.
        """
        maker = makers.get(type(obj))
        return self.make(obj) if maker is None else maker(self, obj)

    def make_tuple(self, items: list[Value]) -> Value:
        """A tuple of values."""
        return TupleValue(items)

    def text_of(self, value: Value, how: Callable[[Any], str]) -> Value:
        """`str(value)` or `repr(value)`."""
        return string.text_of(self, value, how)

    def percent(self, text: Constant, operand: Value) -> Value:
        """`text % operand`."""
        return string.format_percent(self, text, operand)

    def late_percent(self, text: Constant, operand: Value) -> Value | None:
        """`text % operand` as a text that is written after the graph; None where it must be known now."""
        return lazy_text.late_percent(self, text, operand)

    def update_dict(self, into: Value, *sources: Value, named: Mapping[str, Value] = _NO_NAMES) -> None:
        """`dict.update(into, source, **named)`."""
        instances.update_dict(self, into, *sources, named=named)

    def forget(self) -> None:
        """Release the trace's objects, and itself: its parts hold each other, and the program's objects must not
        wait for Python's collector.
        """
        OfTrace.let_go()
        self.reader.forget()
        for tensor in self.tensors.by_example.values():
            tensor.carrier = None
        self.stack.forget()  # it stays: sizes ask where they are asked, and their graph is still to be compiled
        vars(self).clear()

    # Calls --------------------------------------------------------------------------------------------------
    def call(self, fn: Value, args: list[Value], kwargs: dict[str, Value] | None = None) -> Value:
        """Call a value; a break inside cuts before the current instruction of the current frame."""
        tail, self.tail = self.tail, False
        try:
            return fn.call(self, args, kwargs or {})
        finally:
            self.tail = tail

    def tail_call(self, fn: Value, args: list[Value], kwargs: dict[str, Value] | None = None) -> Value:
        """Call a value whose result the caller returns untouched."""
        return fn.call(self, args, kwargs or {})

    def call_method(
        self, obj: Value, name: str, args: list[Value], kwargs: dict[str, Value] | None = None
    ) -> Value:
        """`obj.name(*args, **kwargs)`."""
        return self.call(obj.getattr(self, name), args, kwargs)

    def call_python(
        self, fn: Callable[..., Any], args: list[Value], kwargs: dict[str, Value] | None = None
    ) -> Value:
        """Inline one of our own Python functions (a polyfill); its globals are trusted."""
        return self.call(self.make(fn), args, kwargs)

    def inline(self, func: FunctionValue, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Call a Python function by interpreting it."""
        return inline(self, func, args, kwargs)

    def call_builtin(self, fn: Callable[..., Any], args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Call a C function or unbound C method."""
        return instances.call_builtin(self, fn, args, kwargs)

    def instantiate(self, cls: type, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """`cls(*args, **kwargs)`."""
        return instances.instantiate(self, cls, args, kwargs)

    # Errors --------------------------------------------------------------------------------------
    def error(self, cls: type[BaseException], *args: Any) -> Raised:
        """An exception of the user's program to raise: `raise trace.error(KeyError, key)`; args are values or
        plain objects.
        """
        values = [a if isinstance(a, Value) else self.make(a) for a in args]
        error = instances.new_exception(self, cls, values)
        instances.link_context(self, error)
        return Raised(error)

    def raise_if(self, bad: Any, cls: type[BaseException], *args: Any) -> None:
        """Raise an exception of the user's program if `bad`."""
        if bad:
            raise self.error(cls, *args)

    def exception(self) -> Value | None:
        """The exception that is being handled here. Where no block of the trace handles one, it assumes that the
        caller is not handling one, either.
        """
        if self.stack.handled is None:
            unsupported_if(
                self.stack.handling, "unsupported-value", "the exception that the caller is handling"
            )
            self.reader.guard(ConstEquals(Called(Const(sys, "sys"), _handled), None))
        return self.stack.handled


def _label(obj: Any) -> str:
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    return name if isinstance(name, str) else type(obj).__name__
