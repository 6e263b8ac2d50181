"""The inlined frames of a trace: where they are in the user's source, how far they may run, and where they were cut.

>>> stack.user_line()          # of the innermost frame outside PyTorch
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterable, Sequence

import torch

from ..base.errors import UserLine
from ..base.events import enabled
from .breaks import unsupported, unsupported_if
from .bytecode import returns_nothing
from .interpreter import POLYFILLS, Frame, GeneratorValue
from .values.base import Value
from .values.function import BoundMethod, FunctionValue
from .values.user_object import UserObject

TORCH = torch.__path__[0]
_EXIT = contextlib._GeneratorContextManager.__exit__


class CallStack:
    """Frames from the outermost to the innermost.

    steps: instructions interpreted so far. break_at: the step at which the trace is cut; stopped: the frames at that
    cut. handled: the exception that an `except` block handles; handling: whether the caller of the captured function is
    handling one. generators: all that the trace has made.
    """

    def __init__(self, break_at: int | None, max_steps: int, handling: bool) -> None:
        self.break_at, self.max_steps, self.handling = break_at, max_steps, handling
        self.told = enabled("bytecode")  # each instruction
        self.frames: list[Frame] = []
        self.steps = 0
        self.stopped: tuple[Frame, ...] = ()
        self.handled: Value | None = None
        self.generators: list[GeneratorValue] = []

    def forget(self) -> None:
        """Let the frames go; questions about places have no answer from now on."""
        for generator in self.generators:
            generator.made.clear()
        self.frames, self.stopped, self.generators, self.handled = [], (), [], None

    def stop_before(self, frames: tuple[Frame, ...]) -> None:
        """Cut frames before the instruction that the innermost one has begun."""
        self.stopped = frames
        frames[-1].ip -= 1

    def where(self) -> UserLine | None:
        """The current line of the innermost frame that is not a polyfill."""
        return _innermost(self.frames, (POLYFILLS,))

    def user_line(self) -> UserLine | None:
        """The current line of the innermost frame outside of PyTorch's own modules; of the innermost one, if
        all are inside.
        """
        return _innermost(self.frames, (POLYFILLS, TORCH)) or self.where()

    def user_stack(self) -> tuple[UserLine, ...]:
        """The inlined stack, outermost first."""
        return tuple(f.user_line() for f in self.frames if not f.code.co_filename.startswith(POLYFILLS))

    def is_caught(self, errors: Sequence[type[Exception]]) -> bool:
        """Whether the program's own code may catch an error of the current instruction: a frame, or a generator
        that waits in front of it (of `contextlib.contextmanager`). errors: the classes that an error may have
        itself, none for any.
        """
        waiting = [g.frame for g in self.generators if g.frame.started and not g.finished]
        return any(
            frame.info.is_caught(
                frame.instr.offset,
                lambda at: _may_suppress(frame.stack[at]),  # noqa: B023
                lambda name: _lets_pass(frame.func, name, errors),  # noqa: B023
            )
            for frame in (*self.frames, *waiting)
            if not frame.code.co_filename.startswith((POLYFILLS, TORCH))
        )

    def count_step(self) -> None:
        """Refuse endless loops."""
        if self.steps > self.max_steps:
            raise unsupported(
                "too-long",
                f"more than {self.max_steps} instructions in one trace",
                cure="compile a smaller function, or one without long Python loops",
            )

    def in_with_blocks(self) -> list[GeneratorValue]:
        """The generators of `contextlib.contextmanager` that wait for the end of a `with` block of the cut frames, or
        of such a generator: `__exit__` ends them."""
        found: list[GeneratorValue] = []
        frames = [*self.stopped]
        for frame in frames:
            waiting = [generator for value in frame.stack if (generator := _left_by(value)) is not None]
            found += waiting
            frames += [generator.frame for generator in waiting]
        return found

    def check_generators(self) -> None:
        """Refuse a trace that ends while a generator waits inside a `try` or `with`, unless it is made again."""
        ended = self.in_with_blocks()
        for generator in self.generators:
            unsupported_if(
                generator.has_duties() and generator not in ended,
                "finalizer",
                f"generator {generator.frame.code.co_qualname} is left inside a `try` or `with`",
                "CPython closes it when the last reference goes",
            )


def _left_by(leave: Value | None) -> GeneratorValue | None:
    """The generator that an `__exit__` on a frame's stack ends."""
    function = leave.func if isinstance(leave, BoundMethod) else None
    if not isinstance(function, FunctionValue) or function.fn is not _EXIT:
        return None
    assert isinstance(leave, BoundMethod)
    attributes = leave.instance._dict if isinstance(leave.instance, UserObject) else None
    generator = None if attributes is None else attributes.lookup("gen")
    if not isinstance(generator, GeneratorValue) or not generator.frame.started or generator.finished:
        return None
    return generator


def _may_suppress(leave: Value) -> bool:
    """Whether an `__exit__` may be true. That of `contextlib.contextmanager` asks its generator."""
    function = leave.func if isinstance(leave, BoundMethod) else leave
    fn = function.fn if isinstance(function, FunctionValue) else None
    if fn is None or fn is _EXIT or fn.__code__.co_filename.startswith(TORCH):
        return fn is None
    return not returns_nothing(fn.__code__)


def _lets_pass(function: FunctionValue, name: str, errors: Sequence[type[Exception]]) -> bool:
    """Whether a function's global is a builtin class that none of these errors is an instance of."""
    caught = getattr(builtins, name, None)
    if not errors or not isinstance(caught, type) or any(issubclass(error, caught) for error in errors):
        return False
    return function.globals.lookup(name) is None


def _innermost(frames: Iterable[Frame], outside_of: tuple[str, ...]) -> UserLine | None:
    """The line of the innermost frame whose file is in none of the folders."""
    own = next((f for f in reversed([*frames]) if not f.code.co_filename.startswith(outside_of)), None)
    return None if own is None else own.user_line()
