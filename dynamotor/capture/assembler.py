"""Writes CPython bytecode: a prefix in front of a user's code object that is otherwise unchanged.

>>> a = Assembler(code)
>>> a.emit("RESUME", 0)
>>> a.const(42); a.emit("RETURN_VALUE")
>>> new = put_before(code, a, line=code.co_firstlineno, name="f")
"""

from __future__ import annotations

import dis
import inspect
import types
from typing import Any

from .bytecode import CACHES, IS_311, ExceptionRange, encode_exception_table, parse_exception_table, units

# Room that the prefix and what follows a copied instruction need above the user's stack.
_EXTRA_STACK = 8
_STATE_NAME = ".state"
# A flag that CPython leaves free: the frame hook leaves such code alone (csrc/frame_hook.c).
CO_REBUILT = 1 << 27


class Assembler:
    """Collects instructions by name; knows the caches, EXTENDED_ARG and calling conventions of 3.11 and
    3.12.
    """

    def __init__(self, code: types.CodeType) -> None:
        # A code object without locals gets one in front, so that the state has a place; all slots move by
        # one.
        self.shift = 0 if code.co_nlocals else 1
        self.consts: list[Any] = list(code.co_consts)
        self.data = bytearray()
        self.ranges: list[ExceptionRange] = []

    @property
    def offset(self) -> int:
        return len(self.data)

    def emit(self, name: str, arg: int = 0) -> None:
        """Append one instruction with its prefixes and caches."""
        opcode = dis.opmap[name]
        for shift in (24, 16, 8):
            if arg >> shift:
                self.data += bytes((dis.EXTENDED_ARG, arg >> shift & 255))
        self.data += bytes((opcode, arg & 255)) + bytes(2 * CACHES[opcode])

    def slot(self, name: str, index: int) -> None:
        """An instruction on a slot of the user's frame."""
        self.emit(name, index + self.shift)

    def const(self, value: Any) -> None:
        """Push a constant object (by identity: it need not be marshallable)."""
        self.consts.append(value)
        self.emit("LOAD_CONST", len(self.consts) - 1)

    def cover(self, start: int, end: int, handler: ExceptionRange) -> None:
        """Send exceptions in [start, end) of the prefix to a handler of the user's code."""
        self.ranges.append(ExceptionRange(start, end, handler.target, handler.depth, handler.lasti))

    def call(self, n: int) -> None:
        """Call what lies as NULL, callable, n arguments."""
        if IS_311:
            self.emit("PRECALL", n)
        self.emit("CALL", n)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 64:
        out.append(value & 63 | 64)
        value >>= 6
    out.append(value)
    return bytes(out)


def _line_entry(n_units: int, line_delta: int) -> bytes:
    """A location-table entry without columns for up to 8 code units."""
    signed = -line_delta << 1 | 1 if line_delta < 0 else line_delta << 1
    return bytes((128 | 13 << 3 | n_units - 1,)) + _varint(signed)


def _lines_before(n_units: int, line_delta: int) -> bytes:
    """Entries that put `n_units` on one line and leave the running line where the user's table begins."""
    table, first = b"", True
    left = n_units - 1
    while left > 0:
        size = min(left, 8)
        table += _line_entry(size, line_delta if first else 0)
        left, first = left - size, False
    return table + _line_entry(1, 0 if first else -line_delta)


def _moved_slots(code: types.CodeType) -> bytes:
    """The user's bytecode with every slot number raised by one."""
    raw = bytearray(code.co_code)
    touches_slot = set(dis.haslocal) | set(dis.hasfree)
    for unit in units(code.co_code):
        if unit.opcode in touches_slot:
            if unit.arg >= 255:
                raise ValueError("too many cells to put a local in front of them")
            raw[unit.offset + 1] = unit.arg + 1
    return bytes(raw)


def put_before(code: types.CodeType, prefix: Assembler, line: int, name: str) -> types.CodeType:
    """A code object of one argument (slot 0) that runs the prefix, which jumps into the user's code behind
    it.
    """
    size = prefix.offset
    ranges = [e._replace(target=e.target + size) for e in prefix.ranges]
    ranges += [
        e._replace(start=e.start + size, end=e.end + size, target=e.target + size)
        for e in parse_exception_table(code)
    ]
    varnames = code.co_varnames if code.co_nlocals else (_STATE_NAME, *code.co_varnames)
    delta = line - code.co_firstlineno
    return code.replace(
        co_argcount=1,
        co_posonlyargcount=0,
        co_kwonlyargcount=0,
        co_nlocals=len(varnames),
        co_varnames=varnames,
        co_flags=code.co_flags & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) | CO_REBUILT,
        co_code=bytes(prefix.data) + (_moved_slots(code) if prefix.shift else code.co_code),
        co_consts=tuple(prefix.consts),
        co_stacksize=code.co_stacksize + _EXTRA_STACK,
        co_exceptiontable=encode_exception_table(ranges),
        co_linetable=_lines_before(size // 2, delta) + code.co_linetable,
        co_name=name,
    )
