"""`locals()`, `globals()`, and `vars()` and `dir()` without an argument: the names of the calling function.

>>> "mask" in locals(), sorted(dir())
"""

from __future__ import annotations

import inspect
import sys

from .breaks import unsupported, unsupported_if
from .interpreter import Frame
from .values.base import Trace, Value, builtin_rule
from .values.constant import Constant
from .values.containers import ListValue
from .values.function import CellValue, keywords_of

_ONE_DICT = sys.version_info < (3, 13)  # a frame keeps one dict, which each call of `locals` writes again


def _names(trace: Trace) -> dict[str, Value]:
    """The names of the calling function that have a value."""
    frame: Frame = trace.stack.frames[-1]
    unsupported_if(
        not frame.code.co_flags & inspect.CO_OPTIMIZED, "unsupported-call", "locals() outside of a function"
    )
    found = {}
    for name, slot in zip(frame.info.localsplus, frame.fast, strict=True):
        value = slot.load(trace) if isinstance(slot, CellValue) else slot
        if value is not None and name.isidentifier():  # the parts of a comprehension have names like ".0"
            found[name] = value
    return found


@builtin_rule(locals)
def _locals(trace: Trace) -> Value:
    found, frame = keywords_of(_names(trace)), trace.stack.frames[-1]
    if _ONE_DICT:
        unsupported_if(
            id(frame) in trace.objects.locals_taken,
            "unsupported-call",
            "locals() is called twice in one function",
            "the second call writes the dict of the first",
        )
        trace.objects.locals_taken[id(frame)] = frame
    return found


@builtin_rule(globals)
def _globals(trace: Trace) -> Value:
    return trace.stack.frames[-1].func.globals


@builtin_rule(dir)
def _dir(trace: Trace, obj: Value | None = None) -> Value:
    if obj is not None:
        raise unsupported("unsupported-call", f"dir() of {obj.describe()}")
    return ListValue([Constant(name) for name in sorted(_names(trace))])
