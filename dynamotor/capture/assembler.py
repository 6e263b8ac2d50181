"""Writes CPython bytecode: a prefix in front of a user's code object that is otherwise unchanged.

>>> a = Assembler(code)
>>> a.emit("RESUME", 0)
>>> a.const(42); a.emit("RETURN_VALUE")
>>> new = put_before(code, a, line=code.co_firstlineno, name="f")
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from .bytecode import ExceptionRange, encode_exception_table, parse_exception_table, units
from .opcode_tables import CACHES, NEEDS_BEFORE, PAIRS, VERSION

# Room that the prefix and what follows a copied instruction need above the user's stack.
_EXTRA_STACK = 8
_STATE_NAME = ".state"


class Assembler:
    """Collects instructions by name; knows the caches, EXTENDED_ARG and calling conventions of this Python."""

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

    @contextlib.contextmanager
    def callee(self) -> Iterator[None]:
        """Around the instructions that push a callable: the NULL of the call that follows, on its side of it."""
        if VERSION.null_first:
            self.emit("PUSH_NULL")
        yield
        if not VERSION.null_first:
            self.emit("PUSH_NULL")

    def call(self, n: int) -> None:
        """Call the `callee` with the n arguments above it."""
        for name in VERSION.call:
            self.emit(name, n)

    def under_callee(self) -> None:
        """Move the value below a `callee` above it, as its argument."""
        self.emit("SWAP", 2)
        self.emit("SWAP", 3)

    def call_on_top(self, function: Callable[..., Any]) -> None:
        """Replace the value on top of the stack with `function(value)`."""
        with self.callee():
            self.const(function)
        self.under_callee()
        self.call(1)

    def call_over_null(self, function: Callable[..., Any]) -> None:
        """Replace a NULL and the value above it with `function(value)`: only a call takes a NULL off the stack."""
        self.const(function)
        if not VERSION.null_first:
            self.emit("SWAP", 3)
        self.emit("SWAP", 2)
        self.call(1)

    def test(self, name: str, arg: int) -> None:
        """A conditional jump, or UNARY_NOT, on any value."""
        if name in NEEDS_BEFORE:
            self.emit(NEEDS_BEFORE[name])
        self.emit(name, arg)


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


_ON_SLOTS = frozenset(dis.haslocal) | frozenset(dis.hasfree)


def slot_step(opcode: int) -> int:
    """By how much an instruction's argument grows when every slot number grows by one."""
    return (17 if dis.opname[opcode] in PAIRS else 1) if opcode in _ON_SLOTS else 0


def can_move_slots(code: types.CodeType) -> bool:
    """Whether every slot number can grow by one in place."""
    pairs = (unit.arg for unit in units(code.co_code) if slot_step(unit.opcode) == 17)
    return len(code.co_cellvars) + len(code.co_freevars) < 255 and not any(
        15 in (a >> 4, a & 15) for a in pairs
    )


def _moved_slots(code: types.CodeType) -> bytes:
    """The user's bytecode with every slot number raised by one."""
    raw = bytearray(code.co_code)
    for unit in units(code.co_code):
        step = slot_step(unit.opcode)
        if step:
            raw[unit.offset + 1] = unit.arg + step
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
        co_flags=code.co_flags & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        | VERSION.free_flag,  # the frame hook leaves such code alone
        co_code=bytes(prefix.data) + (_moved_slots(code) if prefix.shift else code.co_code),
        co_consts=tuple(prefix.consts),
        co_stacksize=code.co_stacksize + _EXTRA_STACK,
        co_exceptiontable=encode_exception_table(ranges),
        co_linetable=_lines_before(size // 2, delta) + code.co_linetable,
        co_name=name,
    )
