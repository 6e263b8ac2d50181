"""Graph breaks: cut a trace before one instruction, and plan what runs natively and what goes on captured.

The trace is run again up to the cut (`Trace(break_at=...)`), unless it broke at a jump's test, which changes nothing;
every inlined frame is rebuilt by the generated `finish`, the instruction runs natively, and each frame goes on in a
resume function with a dispatcher of its own (resume.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynamotor import _C

from ..base.errors import traceback_at
from .breaks import Unsupported, unsupported_if
from .bytecode import Instr, localsplus_names
from .interpreter import Frame, GeneratorValue, run_frame
from .ops_control import HandledValue
from .result_emitter import ResultEmitter
from .resume import (
    JUMPS_WITH_TEST,
    NULL,
    UNBOUND,
    Boundary,
    break_function,
    live_slots,
    resume_function,
    successors,
    waiting_generator,
    way_out,
    why_not_rebuilt,
    why_not_resumable,
)
from .source import Arg, Source
from .trace import Trace
from .values.base import Iterator, Value
from .values.constant import BoundBuiltin
from .values.containers import SequenceValue
from .values.function import FunctionValue, globals_of
from .values.torch_function import HeldNumber
from .values.traceback import lacks_traceback

LATE = "late"  # the name of a bool of a tensor that is waited for last
SAME = 2  # times that a bool was the same, before it is guessed
_PUSH_NOTHING = ("DELETE_", "RAISE_", "RETURN_", "STORE_")
# Values whose end runs no code of the program's, or that are held elsewhere.
_UNNOTICED = (
    *(type(None), int, float, complex, str, bytes, type, types.FunctionType, types.ModuleType),
    *(torch.Tensor, torch.nn.Module, torch.Size),
)
# Instructions that only ask for a truth, and take the value from the stack when they know.
_TESTS = JUMPS_WITH_TEST - {"FOR_ITER"} | {"UNARY_NOT"}
_RETURNS = ("RETURN_VALUE", "RETURN_CONST")
_PROLOGUE = frozenset({"COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR"})


def cut_points(stop: Unsupported, generators: Iterable[GeneratorValue]) -> list[tuple[int, int]]:
    """Where the stack of frames can be cut, innermost first: (number of frames kept, instruction count). The
    last ones are where the first of the generators that wait was made, if it is a context manager: CPython
    enters its `with` then, and its body is captured on its own.
    """
    points: list[tuple[int, int]] = []
    if stop.whole or stop.reason.kind == "finalizer":  # where references go is known to CPython alone
        return points
    places = [(frame, frame.step_at) for frame in stop.frames]
    read = stop.read_at  # the rest of an outer frame takes the read value as a constant
    if len(read) < len(places) and all(a is b for (a, _), (b, _) in zip(read, places)):
        places = list(read) or places
    for waiting in (g for g in generators if g.frame.started and not g.finished):
        made = list(
            itertools.takewhile(lambda at: at[0].code.co_filename != contextlib.__file__, waiting.made)
        )
        if len(made) < len(waiting.made):
            both = {*_resumable(places), *_resumable(made)}
            return sorted(both, key=lambda point: point[1], reverse=True)
        if waiting.has_duties():  # each of its steps would be a break
            break
    return _resumable(places)


def stands_before(stop: Unsupported, trace: Trace) -> bool:
    """Whether a trace that breaks is as it was before the breaking instruction: a test changes nothing,
    unless Python code answers it. Not where another trace is to tell which floats are needed as numbers.
    """
    if stop.reason.kind != "data-dependent" or not stop.frames or trace.sizes.floats:
        return False
    frame = stop.frames[-1]
    return frame.step_at == trace.stack.steps and frame.instr.op in _TESTS


def _resumable(places: list[tuple[Frame, int]]) -> list[tuple[int, int]]:
    points: list[tuple[int, int]] = []
    for depth, (frame, step) in enumerate(places):
        if not frame.tail or frame.generator or why_not_resumable(frame.code) is not None:
            break
        points.append((depth + 1, step))
    return points[::-1]


class HeldValue(Value):
    """An object in a variable that nothing reads any more."""

    __slots__ = ("obj",)

    def __init__(self, source: Source, obj: Any) -> None:
        super().__init__(source)
        self.obj = obj

    def python_type(self) -> type:
        return type(self.obj)


@dataclass(frozen=True)
class ResumePoint:
    """The middle of a function, captured by a resume dispatcher. `globals` are the function's."""

    at: Boundary
    globals: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal places of one code object."""
        at = self.at
        return id(at.code), at.offset, at.n_stack, at.nulls, at.unbound, id(self.globals)

    def native(self) -> Callable[..., Any]:
        """The rest of the function, run by CPython."""
        return resume_function(self.at, self.globals)

    def names(self) -> list[str]:
        """A name for each flat value."""
        slots = localsplus_names(self.at.code)
        return [slots[i] for i in self.at.bound_slots] + [f"temporary value {i}" for i in self.at.full_stack]

    def run(self, trace: Trace, args: tuple[Any, ...]) -> Value:
        """Interpret from here on, over the flat values of a call."""
        live, slots = live_slots(self.at.code, self.at.offset), self.at.bound_slots
        read = [*(slot in live for slot in slots), *(True for _ in self.at.full_stack)]
        values = [
            trace.wrap(Arg(i, name), arg) if is_read else HeldValue(Arg(i, name), arg)
            for i, (name, arg, is_read) in enumerate(zip(self.names(), args, read))
        ]
        slots, stack = self.at.unflat(values)
        code = self.at.code
        func = FunctionValue(trace, code, globals_=globals_of(trace, self.globals), closure=[])
        frame = Frame(trace, func, [None if v is UNBOUND else v for v in slots])
        frame.stack = [None if v is NULL else v for v in stack]
        for level in self.at.exception_slots:
            handled, frame.stack[level] = frame.stack[level], HandledValue(trace.stack.handled)
            trace.stack.handled = handled
        frame.ip = frame.info.index[self.at.offset]
        frame.tail, trace.tail = True, False
        return run_frame(trace, frame)


class Continuation:
    """A break function's result instead of a call of the resume dispatcher: a loop with a break in each
    round must not grow the stack."""

    __slots__ = ("dispatcher", "flat", "ready")

    def __init__(self, dispatcher: Callable[..., Any], *flat: Any) -> None:
        self.dispatcher, self.flat = dispatcher, flat
        self.ready: tuple[_C.Entry, tuple[Any, ...], Callable[[], None]] | None = None

    def begin(self) -> None:
        """Find the program that runs if a guess is right, and do those of its steps that have no effect."""
        if not isinstance(self.dispatcher, _C.Dispatcher):  # CPython runs the rest of the function
            return
        for entry in self.dispatcher.entries:
            inputs = entry.program.check(self.flat)
            if inputs is not None:
                begin = getattr(entry.info.data, "begin", None) or _nothing
                with contextlib.suppress(Exception):  # the call raises it, if it comes
                    self.ready = entry, inputs, begin(*inputs)
                return

    def forget(self) -> None:
        """Leave the steps that `begin` did without effect."""
        if self.ready is not None:
            self.ready[2]()
            self.ready = None

    def go(self) -> Any:
        """The call of the dispatcher."""
        if self.ready is None:
            return self.dispatcher(*self.flat)
        assert isinstance(self.dispatcher, _C.Dispatcher)
        try:  # the guards held just now: only the device was waited for
            return self.dispatcher.serve(*self.ready[:2], self.flat)
        finally:
            self.forget()


def _nothing(*inputs: Any) -> Callable[[], None]:
    return lambda: None


def drive(result: Any) -> Any:
    """Go on until a frame has its result."""
    while type(result) is Continuation:
        result = result.go()
    return result


class LateBool:
    """A bool that a GPU still computes when the program branches on it, at one place of the program. Where it was the
    same several times, the host looks for the program that follows and prepares its inputs before it waits.

    >>> late = LateBool()
    >>> late(tensor, lambda flag: resume(flag))     # the second has no effect: it may be called twice
    """

    __slots__ = ("latest", "times")
    devices = ("cuda",)  # where it may still be computed

    def __init__(self) -> None:
        self.latest, self.times = False, 0

    def __call__(self, tensor: torch.Tensor, follow: Callable[[bool], Any]) -> Any:
        if self.times < SAME or tensor.device.type not in self.devices:
            return follow(self._read(tensor))
        guess = self.latest
        result = follow(guess)
        if type(result) is Continuation:
            result.begin()
        value = self._read(tensor)
        if value is guess:
            return result
        if type(result) is Continuation:
            result.forget()
        return follow(value)

    def _read(self, tensor: torch.Tensor) -> bool:
        value = bool(tensor.item())
        self.times = self.times + 1 if value is self.latest else 0
        self.latest = value
        return value


def in_flight(error: BaseException) -> None:
    """Give an exception that only the trace raised a traceback: CPython's handlers rely on it. That of a `raise` here
    would hold the error itself.
    """
    if error.__traceback__ is None:
        error.__traceback__ = traceback_at(
            1, co_filename=__file__, co_name="in_flight", co_qualname="in_flight"
        )


def _operands(frame: Frame) -> list[Any]:
    """The values that the breaking instruction may hand to code that runs natively: no cursor of ours stands for it there."""
    instr = frame.steps[frame.ip][1]
    if instr.op in ("FOR_ITER", "SEND", "YIELD_VALUE"):
        return []
    operands = frame.stack[-_taken(instr) :]
    return [*operands, *(v.instance for v in operands if isinstance(v, BoundBuiltin))]


def _taken(instr: Instr) -> int:
    """How many values an instruction takes from the stack: an iterator below them is the loop's, not an operand."""
    if instr.op == "CALL":
        return instr.arg + 2  # with `self` or the NULL beside the callable
    pushed = instr.target is None and not instr.op.startswith(_PUSH_NOTHING)
    return max(1, pushed - instr.stack_effect(False))


def emit_break(
    trace: Trace,
    emitter: ResultEmitter,
    dispatcher_of: Callable[[ResumePoint], Any],
    natively: Callable[..., Any],
    root: bool,
) -> str:
    """The expression that goes on from the stopped frames of a trace: nested calls of break functions.

    natively: calls the function that runs the breaking instruction. root: the expression must give the result;
    otherwise (a resume function's) it may give a `Continuation`.
    """
    handled = trace.stack.handled
    states: list[tuple[Frame, Boundary, list[Value]]] = []
    for frame in reversed(trace.stack.stopped):
        innermost = frame is trace.stack.stopped[-1]
        instr = frame.steps[frame.ip][1] if innermost else frame.instr
        unsupported_if(instr.op in _PROLOGUE, "reconstruct", "a frame that has not begun cannot be cut")
        at, slots, stack = _state(frame, instr)
        for level in reversed(at.exception_slots):
            saved = stack[level]
            assert isinstance(saved, HandledValue) and handled is not None
            stack[level], handled = handled, saved.value
        for value in stack:
            if isinstance(value, Value) and lacks_traceback(value):
                unsupported_if(
                    instr.op == "RAISE_VARARGS",
                    "reconstruct",
                    "an error that the trace has made is raised behind a break",
                    "frames of ours would hold it, and it these",
                )
                emitter.statement(f"{emitter.constant(in_flight)}({emitter.emit(value)})")
        states.append((frame, at, list(at.flat(slots, stack))))
    for generator in reversed(trace.stack.in_with_blocks()):
        _emit_waiting(emitter, generator)
    late = _late_bool(emitter, states)
    tensor, begin = emitter.emit(late.tensor) if late is not None else "", len(emitter.lines)
    for _, at, values in states:  # what has a name is what CPython has there
        for value in values[: len(at.bound_slots)]:
            emitter.emit(value)
    for value in _operands(trace.stack.stopped[-1]):
        if isinstance(value, Iterator):
            emitter.emit(value)
    emitter.for_frame = True
    expression = ""
    for frame, at, values in states:
        inner = bool(expression)
        namespace = frame.func.globals.obj
        after = [
            None if way_out(b) else functools.partial(Continuation, dispatcher_of(ResumePoint(b, namespace)))
            for b in successors(at, inner=inner)
        ]
        step = break_function(at, after, namespace, inner=inner)
        words = [emitter.emit(v) for v in values]
        if inner:
            name = f"inner{len(emitter.lines)}"
            emitter.statement(f"{name} = lambda: {emitter.constant(drive)}({expression})")
            words.append(name)
        if not inner:
            step = functools.partial(natively, step)
        expression = f"{emitter.constant(step)}({', '.join(words)})"
    _check_closing(trace, emitter)
    if late is not None and emitter.only_reads(begin):
        emitter.nest(begin, f"def follow({LATE}):", expression)
        expression = f"{emitter.constant(LateBool())}({tensor}, follow)"
    elif late is not None:
        emitter.lines.insert(begin, f"{LATE} = {tensor}.item()")
    return f"{emitter.constant(drive)}({expression})" if root else expression


def _state(frame: Frame, instr: Instr) -> tuple[Boundary, list[Any], list[Any]]:
    """A frame before an instruction, with its slots and stack."""
    stack: list[Any] = [NULL if v is None else v for v in frame.stack]
    live = live_slots(frame.code, instr.offset)
    slots = [v if v is not None and (i in live or _is_held(v)) else UNBOUND for i, v in enumerate(frame.fast)]
    return Boundary.of(frame.code, instr.offset, slots, stack), slots, stack


def _emit_waiting(emitter: ResultEmitter, generator: GeneratorValue) -> None:
    """Make the generator of an open `with` block again, waiting where it does."""
    at, slots, stack = _state(generator.frame, generator.frame.instr)
    why = "it waits in an exception handler" if at.exception_slots else why_not_rebuilt(at.code) or ""
    unsupported_if(why, "reconstruct", f"generator {at.code.co_qualname} leaves the captured region", why)
    make = waiting_generator(at, generator.frame.func.globals.obj)
    words = ", ".join(map(emitter.emit, at.flat(slots, stack)))
    emitter.new_object(generator, f"{emitter.constant(make)}({words})")


def _is_held(value: Value) -> bool:
    """Whether it is an object from outside whose end the program may notice (a temporary folder): a variable that
    nothing reads any more holds it until the function returns."""
    if value.source is None:
        items = value.items if isinstance(value, SequenceValue) else ()
        return any(_is_held(item) for item in items if item.source is not None)
    return not issubclass(value.python_type(), _UNNOTICED)


def _check_closing(trace: Trace, emitter: ResultEmitter) -> None:
    """Refuse to hand a generator on to the rest of a function that lets go of it before its end, where closing it
    runs code: CPython does so at once, but what runs the rest holds it longer.
    """
    for generator in trace.stack.generators:
        unsupported_if(
            emitter.is_emitted(generator)
            and generator.will_have_duties()
            and any(_lets_go(frame, generator) for frame in trace.stack.stopped),
            "finalizer",
            f"generator {generator.frame.code.co_qualname} is left inside a `try` or `with`",
            "CPython closes it when the last reference goes",
        )


def _lets_go(frame: Frame, generator: GeneratorValue) -> bool:
    """Whether a frame may leave the loop that it is at before the iterator's end, or drops a variable."""
    begin, info = frame.steps[frame.ip][1], frame.info
    if begin.op == "FOR_ITER":
        body = [i for i in info.instrs if begin.offset < i.offset < begin.goal]
        return any(i.op in _RETURNS or i.target is not None and i.target >= begin.goal for i in body)
    slots = [i for i, value in enumerate(frame.fast) if value is generator]
    drops = [i.arg for i in info.instrs if i.op in ("DELETE_FAST", "STORE_FAST") and i.arg in slots]
    return len(drops) > len(slots)


def _late_bool(
    emitter: ResultEmitter, states: Sequence[tuple[Frame, Boundary, list[Value]]]
) -> HeldNumber | None:
    """The bool of a tensor that the innermost frame branches on, if all frames but the outermost only hand out values
    from there on.
    """
    frame, at, _ = states[0]
    held = frame.stack[-1] if frame.stack and at.instr.op in JUMPS_WITH_TEST else None
    if type(held) is not HeldNumber or held.kind is not bool or emitter.is_emitted(held):
        return None
    for n, (_, place, _) in enumerate(states[:-1]):
        if not all(map(way_out, successors(place, inner=n > 0))):
            return None
    emitter.remember(held, LATE)
    return held
