"""Tests of `a and b` in which `a` makes no difference: where `b` fails, both lead to the same place.

>>> if not too_long and length > limit: warn()      # for any length up to the limit, one program
"""

from __future__ import annotations

from typing import Any

from ..base.narrowing import checked
from .bytecode import Instr
from .interpreter import Frame
from .values.base import MISSING, Trace, Value
from .values.constant import Constant
from .values.operators import SYMBOLS
from .values.size import LateComparison, SizeValue
from .values.user_object import UserObject

_LONGEST = 12  # instructions of a test that is looked at


def leads_there_anyway(frame: Frame, instr: Instr, when: bool) -> bool:
    """Whether a jump on a comparison that has not been asked yet may be taken whatever the answer is: behind it comes
    one more test, without effects, that jumps to the same place. Only where the program would make that test now, so
    that its questions are the program's own.
    """
    value, trace = checked(LateComparison, frame.stack[-1]), frame.trace
    if value.now is when or trace.function_reads.active:
        return False
    stack: list[Value] = []
    for _, step, _ in frame.steps[frame.ip : frame.ip + _LONGEST]:
        if step.op in ("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE"):
            same = len(stack) == 1 and step.target == instr.target
            return same and _is_plain(stack[0]) and trace.truth(stack[0]) is (step.op == "POP_JUMP_IF_TRUE")
        found = _done(frame, step, stack)
        if found is None:
            return False
        stack.append(found)
    return False


def _done(frame: Frame, step: Instr, stack: list[Value]) -> Value | None:
    """The result of an instruction that has no effect, on a stack of its own; None for any other."""
    trace = frame.trace
    if step.op == "LOAD_FAST":
        found: Value | None = frame.fast[step.arg]
        return found
    if step.op == "LOAD_CONST":
        return trace.make(step.argval)
    if step.op == "LOAD_ATTR" and stack:
        return _plain_attribute(trace, stack.pop(), step.argval)
    if step.op == "COMPARE_OP" and len(stack) > 1:
        right, left = stack.pop(), stack.pop()
        return trace.binary(SYMBOLS[step.argval], left, right) if _is_plain(left, right) else None
    return None


def _plain_attribute(trace: Trace, value: Value, name: str) -> Value | None:
    """An attribute that an object's own dict holds, and no code of its class gives."""
    if not isinstance(value, UserObject):
        return None
    cls = value.python_type()
    if trace.type_attr(cls, "__getattribute__") is not object.__getattribute__:
        return None
    return value.instance_attr(trace, name) if trace.type_attr(cls, name) is MISSING else None


def _is_plain(*values: Any) -> bool:
    """Whether they are numbers that Python compares without anybody's code."""
    return all(
        type(v) in (SizeValue, LateComparison) or type(v) is Constant and type(v.value) in (bool, int, float)
        for v in values
    )
