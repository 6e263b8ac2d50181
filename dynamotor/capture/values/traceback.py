"""Where an exception of the trace went: the lines of a traceback, made real when the exception leaves the
trace.
"""

from __future__ import annotations

import types
from collections.abc import Sequence

from ...base.errors import traceback_at
from .base import MISSING, ResultEmitter, Value
from .user_object import UserObject

Line = tuple[types.CodeType, int]


class TracebackValue(Value):
    """A traceback: code and line of each frame, the outermost first."""

    __slots__ = ("lines",)
    kind = types.TracebackType

    def __init__(self, lines: tuple[Line, ...]) -> None:
        super().__init__()
        self.lines = lines

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return emitter.new_object(self, f"{emitter.constant(make_traceback)}({emitter.constant(self.lines)})")


def note_line(error: Value, code: types.CodeType, line: int | None) -> None:
    """An exception passes a line of a frame."""
    if isinstance(error, UserObject) and error.obj is MISSING:
        before = error.slots.get("__traceback__")
        lines = before.lines if isinstance(before, TracebackValue) else ()
        error.slots["__traceback__"] = TracebackValue(((code, line or code.co_firstlineno), *lines))


def lacks_traceback(value: Value) -> bool:
    """Whether it is an exception whose traceback the trace did not set, not even to None."""
    if isinstance(value, UserObject):
        set_here = value.slots if value.obj is MISSING else value.changed_slots
        return "__traceback__" not in set_here and issubclass(value.cls, BaseException)
    return issubclass(value.python_type(), BaseException)


def make_traceback(lines: Sequence[Line]) -> types.TracebackType | None:
    """A traceback that shows these lines, over frames that do nothing."""
    inner = None
    for code, line in reversed(lines):
        inner = traceback_at(
            line, inner, co_filename=code.co_filename, co_name=code.co_name, co_qualname=code.co_qualname
        )
    return inner
