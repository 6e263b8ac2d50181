"""The symbolic interpreter: one `Frame` an inlined Python function, one function an opcode (ops_*.py).

A frame keeps its whole state in `fast` (locals, cells), `stack` and `ip`, so that generators are frames that
stop at a yield, and a graph break can rebuild the frame. A stack item None is CPython's NULL.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

from ..base.errors import UserLine
from ..base.events import log
from ..base.registry import Registry
from .breaks import Stop, Unsupported, too_deep, unsupported
from .bytecode import CodeInfo, Instr, by_code, decode
from .opcode_tables import VERSION
from .polyfills import cursors
from .values.base import MISSING, Iterator, Raised, Trace, Value
from .values.constant import Constant, is_none
from .values.function import FunctionValue, bind_arguments
from .values.traceback import note_line

# Opcode -> function(frame, instr, target index) -> None, or True to leave the frame's loop.
Handler = Callable[["Frame", Instr, int], Any]
opcodes: Registry[str, Handler] = Registry("opcode")
opcode = opcodes.register


def replace(n: int | None, compute: Callable[..., Value | None]) -> Handler:
    """An opcode that puts `compute(frame, instr, *taken)` in the place of the n items on top of the stack
    (None: as many as its argument says); they stay there until it is done. Nothing is put for no value.
    """

    def handle(frame: Frame, instr: Instr, target: int) -> None:
        first = len(frame.stack) - (instr.arg if n is None else n)
        result = compute(frame, instr, *frame.stack[first:])
        frame.stack[first:] = [] if result is None else [result]

    return handle


MAX_DEPTH = 220
POLYFILLS = __file__.rsplit("/", 1)[0] + "/polyfills"
_GENERATOR = inspect.CO_GENERATOR
_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _unknown(frame: Frame, instr: Instr, target: int) -> None:
    raise unsupported(
        "unsupported-op", f"bytecode instruction {instr.op}", "the interpreter has no rule for it"
    )


def _shown(handler: Handler) -> Handler:
    """The handler of an instruction, which is logged with the depth of its frame first."""

    def shown(frame: Frame, instr: Instr, target: int) -> Any:
        log("bytecode", f"{'  ' * len(frame.trace.stack.frames)}{instr}")
        return handler(frame, instr, target)

    return shown


_READING = frozenset(
    (
        "LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST", "BINARY_SUBSCR", "FOR_ITER",
        "CALL", "CALL_FUNCTION_EX",
    )
)  # fmt: skip


def _noted(handler: Handler, instr: Instr) -> Handler:
    """The handler of an instruction of a function that PyTorch calls again: its reads are noted."""
    if instr.op not in _READING:
        return handler

    def noted(frame: Frame, instr: Instr, target: int) -> Any:
        owner = frame.stack[-1] if frame.stack and instr.op != "LOAD_GLOBAL" else None
        done = handler(frame, instr, target)
        for reads in (frame.trace.checkpoint_reads, frame.trace.function_reads):
            if reads.active:
                reads.note(frame, instr, owner)
        return done

    return noted


@by_code
def program_of(code: types.CodeType) -> tuple[CodeInfo, list[tuple[Handler, Instr, int]]]:
    """The decoded code with the handler and the jump target's index of each instruction."""
    info = decode(code)
    steps = [
        (opcodes.get(i.op) or _unknown, i, -1 if i.target is None else info.index[i.target])
        for i in info.instrs
    ]
    return info, steps


class Frame:
    """One activation of a Python function."""

    __slots__ = (
        "trace",
        "func",
        "code",
        "info",
        "steps",
        "fast",
        "stack",
        "ip",
        "tail",
        "result",
        "step_at",
        "started",
        "generator",
    )

    def __init__(self, trace: Trace, func: FunctionValue, slots: list[Any]) -> None:
        self.trace, self.func, self.code = trace, func, func.code
        self.info, self.steps = program_of(func.code)
        self.fast: list[Any] = slots + [None] * (len(self.info.localsplus) - len(slots))
        self.stack: list[Any] = []
        self.ip = 0
        self.tail = False
        self.result: Any = None
        self.step_at = 0
        self.started = False
        self.generator = False

    def push_callee(self, value: Value) -> None:
        """Push a callable and the NULL of its call, as LOAD_GLOBAL and LOAD_METHOD leave them."""
        self.stack += (None, value) if VERSION.null_first else (value, None)

    @property
    def instr(self) -> Instr:
        """The instruction that runs now (or ran last)."""
        return self.steps[max(self.ip - 1, 0)][1]

    def user_line(self) -> UserLine:
        """Where the frame is in the user's source."""
        return UserLine(self.code.co_filename, self.instr.line or self.code.co_firstlineno, self.code.co_name)

    def run(self) -> Any:
        """Run until return or yield; the result is in `result`."""
        trace, stack, steps = self.trace, self.trace.stack, self.steps
        if stack.told:
            log("bytecode", f"{self.user_line()}")
            steps = [(_shown(handler), instr, target) for handler, instr, target in steps]
        if trace.checkpoint_reads.active or trace.function_reads.active:
            steps = [(_noted(handler, instr), instr, target) for handler, instr, target in steps]
        while True:
            handler, instr, target = steps[self.ip]
            stack.steps += 1
            self.step_at = stack.steps
            if stack.steps == stack.break_at or stack.steps > stack.max_steps:
                if stack.steps == stack.break_at:
                    raise Stop
                stack.count_step()
            self.ip += 1
            try:
                if handler(self, instr, target):
                    return self.result
            except Raised as raised:
                trace.tail = False
                self.unwind(raised, instr)

    def unwind(self, raised: Raised, instr: Instr) -> None:
        """Go to the handler of an exception, or let it leave the frame."""
        raised.__traceback__ = None  # whose frames are those of all callers, and hold it: they would stay
        if raised.again:
            raised.again = False
        elif not self.code.co_filename.startswith(POLYFILLS):
            note_line(raised.value, self.code, instr.line)
        handler = self.info.handler(instr.offset)
        if handler is None:
            raised.stack = raised.stack or self.trace.stack.user_stack()
            raise raised
        del self.stack[handler.depth :]
        if handler.lasti:
            self.stack.append(Constant(instr.offset // 2))  # in code units, as CPython counts
        self.stack.append(raised.value)
        self.ip = self.info.index[handler.target]


def inline(trace: Trace, func: FunctionValue, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Call a Python function by interpreting it."""
    frame = Frame(trace, func, bind_arguments(trace, func, args, kwargs))
    flags = func.code.co_flags
    if flags & _GENERATOR:
        frame.generator = True
        generator = GeneratorValue(frame)
        generator.made = [(frame, frame.step_at) for frame in trace.stack.frames]
        trace.stack.generators.append(generator)
        return generator
    if flags & _ASYNC:
        raise unsupported(
            "generator", f"{func.describe()} is asynchronous", cure="compile the synchronous part only"
        )
    frame.tail, trace.tail = trace.tail, False
    return run_frame(trace, frame)


def run_frame(trace: Trace, frame: Frame) -> Any:
    """Run a frame on top of the stack of frames."""
    if len(trace.stack.frames) >= MAX_DEPTH:
        raise too_deep(f"more than {MAX_DEPTH} calls deep")
    trace.stack.frames.append(frame)
    try:
        return frame.run()
    except Unsupported as stop:
        stop.at(trace.stack.user_stack())
        if not stop.frames:
            stop.frames = tuple(trace.stack.frames)
        raise
    except Stop:
        if not trace.stack.stopped:
            trace.stack.stopped = tuple(trace.stack.frames)
        raise
    finally:
        trace.stack.frames.pop()


ITERATORS: dict[types.CodeType, type] = {}  # what generators of ours stand for, by their code


class GeneratorValue(Iterator):
    """A generator: a frame that is stepped."""

    __slots__ = ("frame", "finished", "running", "made")
    made: list[tuple[Frame, int]]  # the frames that it was made in, and their steps then

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame, self.finished, self.running = frame, False, False

    def python_type(self) -> type:
        return ITERATORS.get(self.frame.code, types.GeneratorType)

    def next(self, trace: Trace) -> Value | None:
        yielded, value = self.send(trace, Constant(None))
        return value if yielded else None

    def send(self, trace: Trace, value: Value) -> tuple[bool, Value]:
        """(True, yielded value) or (False, return value)."""
        if self.finished:
            return False, Constant(None)
        if self.frame.started:
            self.frame.stack.append(value)
        elif not is_none(value):
            raise trace.error(TypeError, "can't send non-None value to a just-started generator")
        return self._step(trace)

    def throw(self, trace: Trace, error: Value) -> tuple[bool, Value]:
        """Raise an exception at the yield where the generator waits."""
        frame = self.frame
        raised = Raised(error)
        if self.finished or not frame.started:
            self.finished = True
            raise raised
        inner = self._delegate()
        if inner is not None:
            try:
                yielded, value = inner.throw(trace, error)
            except Raised as again:
                raised = again
            else:
                if yielded:
                    return True, value
                raise unsupported("generator", "an exception thrown through `yield from` was handled inside")
        trace.stack.frames.append(frame)
        try:
            frame.unwind(raised, frame.instr)
        except Raised:
            self.finished = True
            raise
        finally:
            trace.stack.frames.pop()
        return self._step(trace)

    def close(self, trace: Trace) -> None:
        """`generator.close()`."""
        try:
            trace.raise_if(
                self.throw(trace, trace.error(GeneratorExit).value)[0],
                RuntimeError,
                "generator ignored GeneratorExit",
            )
        except Raised as raised:
            if not raised.is_a((GeneratorExit, StopIteration)):
                raise

    def _delegate(self) -> GeneratorValue | None:
        frame = self.frame
        waits = frame.ip >= 2 and frame.steps[frame.ip - 2][1].op == "SEND" and frame.stack
        return frame.stack[-1] if waits and isinstance(frame.stack[-1], GeneratorValue) else None

    def _step(self, trace: Trace) -> tuple[bool, Value]:
        frame = self.frame
        trace.raise_if(self.running, ValueError, "generator already executing")
        frame.started = True
        self.running = True
        trace.tail = False
        handled = trace.stack.handled
        try:
            result = run_frame(trace, frame)
        except Raised as raised:
            self.finished = True
            if raised.is_a(StopIteration) and frame.code.co_filename.startswith(POLYFILLS):
                return False, Constant(None)  # iterators that are written in C end there
            if raised.is_a(StopIteration):
                error = trace.error(RuntimeError, "generator raised StopIteration")
                for name in ("__context__", "__cause__"):
                    error.value.setattr(trace, name, raised.value)
                raise error from None
            raise
        finally:
            self.running = False
            trace.stack.handled = handled
        if frame.instr.op == "YIELD_VALUE":
            return True, result
        self.finished = True
        return False, result

    def has_duties(self) -> bool:
        """Whether it waits inside a `try` or `with`: closing it, which CPython does when the last reference
        goes, runs code.
        """
        frame = self.frame
        return frame.started and not self.finished and frame.info.acts_on_exit(frame.instr.offset)

    def will_have_duties(self) -> bool:
        """Whether it has not begun, and is going to wait inside a `try` or `with`."""
        info = self.frame.info
        waits = [instr.offset for instr in info.instrs if instr.op == "YIELD_VALUE"]
        return not self.frame.started and any(map(info.acts_on_exit, waits))

    def reconstruct(self, emitter: Any) -> str:
        frame, kind = self.frame, self.python_type()
        if self.finished:
            return emitter.new_object(self, f"{emitter.constant(cursors.ended)}({emitter.constant(kind)})")
        if not frame.started and frame.func.fn is not MISSING and kind not in (cursors.Tee, cursors.Group):
            words = _call_again(emitter, frame)
            if kind is itertools.repeat:  # which takes no None
                words = words.removesuffix(", None")
            made = (
                "iter"
                if kind is cursors.Until
                else emitter.emit(frame.func if kind is types.GeneratorType else Constant(kind))
            )
            return emitter.new_object(self, f"{made}({words})")
        raise unsupported(
            "generator",
            f"generator {self.frame.code.co_qualname} leaves the captured region",
            "a suspended generator cannot be rebuilt",
            "use a list instead",
        )


def _call_again(emitter: Any, frame: Frame) -> str:
    """The arguments with which a frame that has not started was called."""
    code, values = (
        frame.code,
        [emitter.emit(value) for value in frame.fast[: len(frame.code.co_varnames)] if value is not None],
    )
    n, named = (
        code.co_argcount,
        code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount],
    )
    words = values[:n]
    rest = values[n + len(named) :]
    if code.co_flags & inspect.CO_VARARGS:
        words.append(f"*{rest.pop(0)}")
    words += [f"{name}={value}" for name, value in zip(named, values[n:])]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        words.append(f"**{rest.pop(0)}")
    return ", ".join(words)
