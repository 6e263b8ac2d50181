"""One trace: the graph, the reader, the effects and the stack of inlined frames, and the calls between
values.

Calls between values go through `trace.call` (the caller goes on working with the result) or `trace.tail_call`
(the caller returns the result as it is). Only a tail call can be resumed when the graph breaks inside; a
break inside any other call moves out to the instruction that started it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from ..base.errors import UserLine
from .breaks import OfTrace, unsupported, unsupported_if
from .checkpoint_reads import CheckpointReads
from .checks import Checks
from .effects import Effects
from .graph_builder import GraphBuilder
from .guards import ConstEquals
from .interpreter import POLYFILLS, Frame, inline
from .late_code import LateCode
from .protocol import Protocol
from .reader import Reader
from .source import Called, Const, DictItem, Source
from .symbolic_inputs import SizePolicy, TraceSizes
from .values import instances, lazy_text, string
from .values.base import Raised, Value, makers
from .values.constant import Constant
from .values.tensor import TensorValue

_NONE: Mapping[Source, Any] = {}
TORCH = torch.__path__[0]
# Constants whose values need no identity: made again freely.
PLAIN = frozenset(
    (int, float, bool, str, bytes, complex, type(None), type(Ellipsis), type(NotImplemented), range)
)


def _handled(_: object) -> BaseException | None:
    return sys.exception()


class Trace(Protocol):
    """The state of one symbolic run. `break_at` is the instruction count at which to stop (see
    frontend.py).
    """

    # What other files do with a trace, for those that they are made of.
    inline, format_percent, text_of = inline, string.format_percent, string.text_of
    late_percent = lazy_text.late_percent
    instantiate, new_exception, link_context = (
        instances.instantiate,
        instances.new_exception,
        instances.link_context,
    )
    call_builtin, inline_function = instances.call_builtin, instances.inline_function
    update_dict, make_tuple = instances.update_dict, instances.make_tuple

    def __init__(
        self,
        *,
        break_at: int | None = None,
        max_steps: int = 3_000_000,
        policy: SizePolicy | None = None,
        fixed: Mapping[Source, Any] = _NONE,
        handling: bool = False,
    ) -> None:
        """handling: whether the caller is handling an exception."""
        self.frames: list[Frame] = []
        self.handling = handling
        self.graded = torch.is_grad_enabled()  # at the start
        self.sizes = TraceSizes(policy or SizePolicy(dynamic=False), self.where, fixed)
        self.floats: dict[str, Any] = {}  # sources of floats that differ between calls, by their text
        self.graph = GraphBuilder(self.user_line)
        self.reader = Reader(self)
        self.checkpoint_reads = CheckpointReads(self)
        self.late_code = LateCode()
        self.effects = Effects(self)
        self.checks = Checks(self)
        self.tensors: dict[int, TensorValue] = {}  # by the ids of their ShapeTensors
        self.outside: list[TensorValue] = []  # those that have a real tensor
        self.recorded: set[Any] = set()  # memories of tensors that calls took whose results have a history
        self.global_hooks: list[Value | None] = []  # the tables of hooks for all modules, once they are read
        self.standing: dict[type, Value] = {}  # effects of which a trace has one (values/context.py)
        self._type_attrs = {}
        self.class_writes = {}
        self.cached: dict[
            Any, Value
        ] = {}  # what functions under `lru_cache` gave for objects that the trace made
        self.must_stay: dict[Value, str] = {}  # objects that cannot leave the trace, and why
        self.locals_taken: dict[int, Frame] = {}  # frames of which `locals()` was called, by their ids
        self.draws = False  # a call takes random numbers
        self.asked: set[str] = set()  # "requires_grad", "strides": the program looks at them
        self.repeated: set[Source] = set()  # modules that come as arguments, one after the other
        self.owner: Source | None = None  # of the module, where the program is for all modules of its class
        self.given_away: set[Any] = set()  # memories that parameters made in the trace have taken over
        self.read_only: set[Any] = set()  # memories of NumPy's read-only arrays
        self.whole: list[Any] = []  # states of sharded modules whose parameters are whole here
        self.plain_calls = 0  # open regions in which no `__torch_function__` is asked
        # Tangents of forward-mode differentiation hang on tensors without a trace in their dispatch keys.
        self.reader.guard(
            ConstEquals(DictItem(Const(vars(forward_ad), "torch.autograd.forward_ad"), "_current_level"), -1)
        )
        self.steps = 0
        self.break_at = break_at
        self.max_steps = max_steps
        # True between an instruction's call and the inlining that it directly stands for (see module
        # docstring).
        self.tail = False
        self.contexts: list[Any] = []  # active context values (no_grad, autocast, ...), innermost last
        self.handled: Value | None = None  # the exception that an `except` block is handling
        self.stopped: tuple[Frame, ...] = ()  # the frames at the cut
        self.generators: list[Any] = []
        self.read_at: dict[int, Any] = {}  # where numbers that are held were read: frames hold these numbers

    # Values -------------------------------------------------------------------------------------------------
    def wrap(self, source: Any, obj: Any) -> Value:
        """The value of an object read from outside; installs the guards of the read. One object is one
        value.
        """
        return self.reader.wrap(source, obj)

    def make(self, obj: Any) -> Value:
        """The value of a real result computed at trace time: plain constants, or an object that the entry
        holds (functions, classes, containers of the library, ...)."""
        cls = type(obj)
        return Constant(obj) if cls in PLAIN else self.reader.wrap(Const(obj, _label(obj)), obj)

    def fresh(self, obj: Any) -> Value:
        """Like `make`, for a result without other references: lists, dicts and sets become ones made in the
        trace.
        """
        maker = makers.get(type(obj))
        return self.make(obj) if maker is None else maker(self, obj)

    def forget(self) -> None:
        """Release the trace's objects, and itself: its parts hold each other, and the program's objects must not
        wait for Python's collector.
        """
        OfTrace.let_go()
        for generator in self.generators:
            generator.made.clear()
        vars(self).clear()
        self.frames = []  # sizes ask where they are asked, and their graph is still to be compiled

    def check_generators(self) -> None:
        """Refuse a trace that ends while a generator waits inside a `try` or `with`."""
        for generator in self.generators:
            unsupported_if(
                generator.has_duties(),
                "finalizer",
                f"generator {generator.frame.code.co_qualname} is left inside a `try` or `with`",
                "CPython closes it when the last reference goes",
            )

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

    # Errors and places --------------------------------------------------------------------------------------
    def error(self, cls: type[BaseException], *args: Any) -> Raised:
        """An exception of the user's program to raise: `raise trace.error(KeyError, key)`; args are values or
        plain objects.
        """
        values = [a if isinstance(a, Value) else self.make(a) for a in args]
        error = self.new_exception(cls, values)
        self.link_context(error)
        return Raised(error)

    def raise_if(self, bad: Any, cls: type[BaseException], *args: Any) -> None:
        """Raise an exception of the user's program where that is so."""
        if bad:
            raise self.error(cls, *args)

    def exception(self) -> Value | None:
        """The exception that is being handled here. Where no block of the trace handles one, it relies on it
        that its caller handles none, either.
        """
        if self.handled is None:
            unsupported_if(self.handling, "unsupported-value", "the exception that the caller is handling")
            self.reader.guard(ConstEquals(Called(Const(sys, "sys"), _handled), None))
        return self.handled

    def where(self) -> UserLine | None:
        """The current line of the innermost frame that is not a polyfill."""
        for frame in reversed(self.frames):
            if not frame.code.co_filename.startswith(POLYFILLS):
                return frame.user_line()
        return None

    def user_line(self) -> UserLine | None:
        """The current line of the innermost frame outside of PyTorch's own modules; of the innermost one, if
        all are inside.
        """
        own = next(
            (f for f in reversed(self.frames) if not f.code.co_filename.startswith((POLYFILLS, TORCH))), None
        )
        return self.where() if own is None else own.user_line()

    def user_stack(self) -> tuple[UserLine, ...]:
        """The inlined stack, outermost first."""
        return tuple(f.user_line() for f in self.frames if not f.code.co_filename.startswith(POLYFILLS))

    def count_step(self) -> None:
        """Refuse endless loops."""
        if self.steps > self.max_steps:
            raise unsupported(
                "too-long",
                f"more than {self.max_steps} instructions in one trace",
                cure="compile a smaller function, or one without long Python loops",
            )


def _label(obj: Any) -> str:
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    return name if isinstance(name, str) else type(obj).__name__
