"""Code objects decoded once into normalised instructions, the same for all supported versions of CPython.

`decode(code).instrs` has no caches, EXTENDED_ARG, PRECALL, KW_NAMES or RESUME; jumps have no direction, and
instructions that CPython fused are apart. See NORMALISED for the form of each differing instruction, and
`opcode_tables.py` for the differences. Offsets are bytes into `co_code`, of the instruction's first unit; the
second half of a fused instruction has the odd offset behind the first half's.

>>> [i.op for i in decode((lambda x: x + 1).__code__).instrs]
['LOAD_FAST', 'LOAD_CONST', 'BINARY_OP', 'RETURN_VALUE']
"""

from __future__ import annotations

import builtins
import dis
import inspect
import itertools
import opcode
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ..base.narrowing import checked
from .opcode_tables import (
    BINARY_OPERATORS,
    CACHES,
    COMMON_CONSTANTS,
    DROPPED,
    INTRINSICS,
    JOINED,
    PARTS,
    RENAMED,
    SPECIAL_METHODS,
    TAKES_ARGUMENT,
    VERSION,
)

Found = TypeVar("Found")
# Facts for the interpreter, beside `dis`'s of an opcode:
NORMALISED = {
    "LOAD_GLOBAL": "argval: name; arg: True when a NULL is pushed below the value",
    "LOAD_METHOD": "argval: name; pushes (function, self) or (NULL, attribute)",
    "LOAD_ATTR": "argval: name",
    "LOAD_SUPER_ATTR": "argval: name; arg: (True when it loads a method, True for two-argument super)",
    "CALL": "arg: number of arguments, keywords included; argval: keyword names; stack: NULL and a callable (in the version's "
    "order) or a function and self, arguments",
    "CALL_FUNCTION_EX": "arg: 1 when a dict of keywords or NULL is on top",
    "JUMP": "target",
    "POP_JUMP_IF_FALSE": "target; also _TRUE, _NONE, _NOT_NONE; takes any value, as UNARY_NOT does",
    "JUMP_IF_FALSE_OR_POP": "target; also _TRUE_; 3.11 only",
    "FOR_ITER": "pushes the next item; when exhausted pops the iterator and goes to target",
    "SEND": "arg: True when the receiver stays below the result (3.12)",
    "LOAD_FAST": "argval: name; may be unbound (LOAD_FAST_CHECK is folded in)",
    "LOAD_FAST_AND_CLEAR": "pushes the local or NULL, and unbinds it; STORE_FAST of NULL unbinds",
    "BINARY_OP": "argval: the operator's text, such as '+' or '+='",
    "BINARY_SUBSCR": "an opcode of its own in 3.14, too",
    "COMPARE_OP": "argval: the operator's text; the result is no bool yet",
    "LOAD_COMMON_CONSTANT": "argval: the constant, such as AssertionError",
    "LOAD_SPECIAL": "argval: name of the special method; pushes as LOAD_METHOD (3.14, for `with`)",
    "WITH_EXCEPT_START": "arg: position of __exit__ from the top",
    "MAKE_FUNCTION": "argval: flags of the items below the code (1 defaults, 2 of keywords, 4 annotations, 8 closure, 16 a function "
    "that computes annotations), from the top down",
    "IS_OP": "argval: True when inverted; CONTAINS_OP likewise",
    "UNARY_POSITIVE": "and LIST_TO_TUPLE, IMPORT_STAR, PRINT_EXPR, STOPITERATION_ERROR, PREP_RERAISE_STAR: intrinsics by name",
}

_NAMES_OF_KEYWORDS = frozenset({"KW_NAMES", "LOAD_CONST"})


class Instr(NamedTuple):
    """One normalised instruction. `offset`..`end` are the bytes it covers, its prefixes and companions
    included.
    """

    op: str
    arg: Any
    argval: Any
    offset: int
    end: int
    line: int | None
    target: int | None = None
    # The instructions that do it natively: those before the last one, then that one.
    before: tuple[tuple[int, int], ...] = ()
    opcode: int = 0
    raw_arg: int = 0
    last: int = 0  # where that one begins

    @property
    def goal(self) -> int:
        """The target of a jump."""
        return checked(int, self.target)

    def stack_effect(self, jump: bool) -> int:
        """By how much the stack grows, as CPython's compiler counts it."""
        return sum(
            dis.stack_effect(number, arg if TAKES_ARGUMENT[number] else None, jump=jump)
            for number, arg in (*self.before, (self.opcode, self.raw_arg))
        )

    def __str__(self) -> str:
        shown = (
            f" -> {self.target}"
            if self.target is not None
            else ""
            if self.argval is None
            else f" {self.argval!r}"
        )
        return f"{self.offset:5d} {self.op}{shown}"


# An entry of the exception table: in [start, end) an exception cuts the stack to depth, pushes, goes to target.
ExceptionRange: Any = vars(dis)["_ExceptionTableEntry"]
parse_exception_table: Callable[[types.CodeType], list[Any]] = vars(dis)["_parse_exception_table"]


class Unit(NamedTuple):
    """One raw instruction: byte offset of its first EXTENDED_ARG or itself, opcode, full argument, end past
    its caches.
    """

    start: int
    offset: int
    opcode: int
    arg: int
    end: int

    @property
    def name(self) -> str:
        return opcode.opname[self.opcode]


# In handlers: tests of an error's class, what may stand before them, and how a handler ends.
_CATCHES = {"CHECK_EXC_MATCH", "CHECK_EG_MATCH"}
_NAMES_CLASSES = {
    "LOAD_GLOBAL", "LOAD_FAST", "LOAD_NAME", "LOAD_DEREF", "LOAD_ATTR", "BUILD_TUPLE", "COPY", "BUILD_LIST", "SWAP",
}  # fmt: skip
_ENDS = {"POP_EXCEPT", "RERAISE", "RAISE_VARARGS"}


@dataclass(frozen=True)
class CodeInfo:
    """A decoded code object. `index` maps an offset to the position of its instruction in `instrs`."""

    code: types.CodeType
    instrs: tuple[Instr, ...]
    index: dict[int, int]
    exceptions: tuple[ExceptionRange, ...]
    localsplus: tuple[str, ...]
    _handlers: dict[int, ExceptionRange | None] = field(default_factory=dict, repr=False)

    @property
    def is_generator_like(self) -> bool:
        """Whether calling it makes a generator, coroutine or async generator instead of running the body."""
        return bool(
            self.code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
        )

    def handler(self, offset: int) -> ExceptionRange | None:
        """The exception range that covers an offset (the table's ranges do not overlap), or None."""
        if offset not in self._handlers:
            self._handlers[offset] = next((e for e in self.exceptions if e.start <= offset < e.end), None)
        return self._handlers[offset]

    def _met(self, offset: int) -> Iterator[tuple[ExceptionRange, int]]:
        """The handlers that an error at an offset meets, each with the position of its PUSH_EXC_INFO, if those before
        raise it again. Handlers that CPython adds itself are left out.
        """
        while (found := self.handler(offset)) is not None:
            at = self.index[found.target]
            if self.instrs[at].op == "PUSH_EXC_INFO":
                yield found, at
                offset = found.target
            else:
                offset = next(i.offset for i in self.instrs[at:] if i.op in ("RERAISE", "CLEANUP_THROW"))

    def _passes(self, at: int, lets_pass: Callable[[str], bool]) -> bool:
        """Whether the handler at the position `at` consists of `except` clauses for classes that are named by globals,
        all of which let an error pass.
        """
        while True:
            at = start = at + 1
            while self.instrs[at].op == "LOAD_GLOBAL":
                at += 1
            names = [instr.argval for instr in self.instrs[start:at]]
            at += self.instrs[at].op == "BUILD_TUPLE"
            if self.instrs[at].op != "CHECK_EXC_MATCH":
                return at == start and self.instrs[at].op == "RERAISE"
            if not names or not all(map(lets_pass, names)):
                return False
            at = self.index[self.instrs[at + 1].goal] - 1

    def acts_on_exit(self, offset: int) -> bool:
        """Whether code runs when a generator that waits at an offset is closed: not that of `except` clauses for
        builtin exceptions that are Exceptions, since GeneratorExit passes over them.
        """

        def lets_pass(name: str) -> bool:
            caught = getattr(builtins, name, None)
            return isinstance(caught, type) and issubclass(caught, Exception)

        return not all(self._passes(at, lets_pass) for _, at in self._met(offset))

    def is_caught(
        self, offset: int, may_suppress: Callable[[int], bool], lets_pass: Callable[[str], bool]
    ) -> bool:
        """Whether an `except` clause covers an offset, a `with` whose `__exit__` may suppress an error (asked with its
        position on the stack), or a `finally` that returns. lets_pass: whether a global name is that of a class
        that no such error is an instance of.
        """
        for found, at in self._met(offset):
            if self._passes(at, lets_pass):
                continue
            rest = self.instrs[at + 1 :]
            first = next(instr for instr in rest if instr.op not in _NAMES_CLASSES)
            leaves = first.op == "WITH_EXCEPT_START" and may_suppress(found.depth + 3 - first.arg)
            end = next(instr.op for instr in rest if instr.op in _ENDS)
            if first.op in _CATCHES or leaves or end == "POP_EXCEPT":
                return True
        return False

    def at(self, offset: int) -> Instr:
        """The instruction at an offset."""
        return self.instrs[self.index[offset]]

    def __str__(self) -> str:
        return "\n".join(map(str, self.instrs))


def units(raw: bytes) -> Iterator[Unit]:
    """The raw instructions of `co_code`, with EXTENDED_ARG folded in and caches skipped."""
    at, start, extended = 0, 0, 0
    while at < len(raw):
        op, arg = raw[at], raw[at + 1] | extended << 8
        end = at + 2 + 2 * CACHES[op]
        if op == dis.EXTENDED_ARG:
            extended = arg
        else:
            yield Unit(start, at, op, arg, end)
            extended, start = 0, end
        at = end


def by_code(compute: Callable[[types.CodeType], Found]) -> Callable[[types.CodeType], Found]:
    """A function of code objects that is computed once for each: by identity, since equal ones may differ in their
    file names. A known entry keeps its code object, so that no id is used again.
    """
    known: dict[int, tuple[types.CodeType, Found]] = {}

    def ask(code: types.CodeType) -> Found:
        found = known.get(id(code))
        if found is None:
            found = known[id(code)] = code, compute(code)
        return found[1]

    return ask


def encode_exception_table(ranges: list[ExceptionRange]) -> bytes:
    """The bytes of `co_exceptiontable` for ranges sorted by start."""
    out = bytearray()

    def number(value: int, flag: int = 0) -> None:
        digits = [value & 63]
        while value := value >> 6:
            digits.append(value & 63)
        for i, digit in enumerate(reversed(digits)):
            out.append(digit | (64 if i + 1 < len(digits) else 0) | (flag if i == 0 else 0))

    for e in ranges:
        number(e.start // 2, 128)
        number((e.end - e.start) // 2)
        number(e.target // 2)
        number(e.depth << 1 | e.lasti)
    return bytes(out)


def localsplus_names(code: types.CodeType) -> tuple[str, ...]:
    """Names of a frame's fast slots: locals, then cells that are no locals, then free variables."""
    extra = tuple(name for name in code.co_cellvars if name not in code.co_varnames)
    return code.co_varnames + extra + code.co_freevars


Form = Callable[[int, types.CodeType, tuple[str, ...]], tuple[str, Any, Any]]


def _form(opcode_: int) -> Form:
    """A function that gives (op, arg, argval) of one raw instruction for its argument, code and names of slots."""
    name = opcode.opname[opcode_]
    op = RENAMED.get(name, name)
    if name == "LOAD_GLOBAL":
        return lambda arg, code, slots: (op, bool(arg & 1), code.co_names[arg >> 1])
    if name == "LOAD_ATTR" and VERSION.method_bit:
        return lambda arg, code, slots: ("LOAD_METHOD" if arg & 1 else op, None, code.co_names[arg >> 1])
    if name == "LOAD_SUPER_ATTR":
        return lambda arg, code, slots: (op, (bool(arg & 1), bool(arg & 2)), code.co_names[arg >> 2])
    if name == "LOAD_SMALL_INT":
        return lambda arg, code, slots: (op, arg, arg)
    if op == "LOAD_COMMON_CONSTANT":
        return lambda arg, code, slots: (op, arg, COMMON_CONSTANTS[arg])
    if name == "LOAD_SPECIAL":
        return lambda arg, code, slots: (op, None, SPECIAL_METHODS[arg])
    if opcode_ in dis.hasconst and name != "KW_NAMES":
        return lambda arg, code, slots: (op, arg, code.co_consts[arg])
    if opcode_ in dis.hasname:
        return lambda arg, code, slots: (op, arg, code.co_names[arg])
    if (opcode_ in dis.haslocal or opcode_ in dis.hasfree) and name not in PARTS:
        return lambda arg, code, slots: (op, arg, slots[arg])
    if name == "COMPARE_OP":
        return lambda arg, code, slots: (op, arg, dis.cmp_op[arg >> VERSION.compare_shift])
    if name == "BINARY_OP":
        return lambda arg, code, slots: (
            "BINARY_SUBSCR" if BINARY_OPERATORS[arg] == "[]" else op,
            arg,
            BINARY_OPERATORS[arg],
        )
    if name in ("IS_OP", "CONTAINS_OP"):
        return lambda arg, code, slots: (op, arg, bool(arg))
    if name in INTRINSICS:
        return lambda arg, code, slots: (INTRINSICS[name].get(arg, name), arg, None)
    if name == "SEND":
        return lambda arg, code, slots: (op, VERSION.send_keeps, None)
    if name == "WITH_EXCEPT_START":
        return lambda arg, code, slots: (op, VERSION.exit_depth, None)
    if name == "CALL_FUNCTION_EX" and not TAKES_ARGUMENT[opcode_]:
        return lambda arg, code, slots: (op, 1, None)
    if TAKES_ARGUMENT[opcode_]:
        return lambda arg, code, slots: (op, arg, None)
    return lambda arg, code, slots: (op, None, None)


def _reach(opcode_: int) -> Callable[[int, int], int] | None:
    """A function that gives the offset that a raw instruction may jump to, of its end and argument; None where it
    does not jump. All jumps are relative.
    """
    name = opcode.opname[opcode_]
    if opcode_ not in dis.hasjrel or name == "END_ASYNC_FOR":
        return None
    if name == "FOR_ITER":  # leaves the loop past its end: it pops the iterator itself
        return lambda end, arg: end + 2 * arg + 2 * len(VERSION.loop_end)
    if "BACKWARD" in name:
        return lambda end, arg: end - 2 * arg
    return lambda end, arg: end + 2 * arg


# Asked once for each opcode: a first call decodes some thousand instructions.
_FORMS = tuple(map(_form, range(256)))
_REACHES = tuple(map(_reach, range(256)))
_DROPPED = frozenset(dis.opmap[name] for name in DROPPED if name in dis.opmap)
_PARTS = {dis.opmap[name]: parts for name, parts in PARTS.items() if name in dis.opmap}
_JOINED = {
    dis.opmap[name]: frozenset(dis.opmap[n] for n in others if n in dis.opmap)
    for name, others in JOINED.items()
    if name in dis.opmap
}


def _line_lookup(code: types.CodeType) -> dict[int, int | None]:
    return {offset: line for start, end, line in code.co_lines() for offset in range(start, end, 2)}


def _apart(raw: Iterable[Unit]) -> Iterator[Unit]:
    """The raw instructions, with those that are several in one taken apart."""
    for unit in raw:
        parts = _PARTS.get(unit.opcode)
        if parts is None:
            yield unit
            continue
        start, offset = unit.start, unit.offset
        *first, (name, arg) = parts(unit.arg)
        for other, its_arg in first:
            yield Unit(start, offset, dis.opmap[other], its_arg, unit.offset + 1)
            start = offset = unit.offset + 1
        yield Unit(start, offset, dis.opmap[name], arg, unit.end)


def _function_flags(number: int, arg: int, before: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """The flags of one MAKE_FUNCTION, or of one and the SET_FUNCTION_ATTRIBUTEs behind it."""
    if before:
        return (*(flag for _, flag in before[1:]), arg)
    return tuple(flag for flag in (8, 4, 2, 1) if TAKES_ARGUMENT[number] and arg & flag)


@by_code
def decode(code: types.CodeType) -> CodeInfo:
    """The decoded code object."""
    slots, lines = localsplus_names(code), _line_lookup(code)
    fused = list(units(code.co_code))
    raw = [unit for unit in _apart(fused) if unit.opcode not in _DROPPED]
    targets = [reach(unit.end, unit.arg) if (reach := _REACHES[unit.opcode]) else None for unit in raw]
    aims = set(targets)
    instrs: list[Instr] = []
    before: tuple[tuple[int, int], ...] = ()
    begin = 0  # of the instruction, with those before it that are one with it
    for i, (start, offset, number, raw_arg, end) in enumerate(raw):
        begin = begin if before else start
        joined = _JOINED.get(number)
        if joined and i + 1 < len(raw) and raw[i + 1].opcode in joined and raw[i + 1].start not in aims:
            before = (*before, (number, raw_arg))
            continue
        op, arg, argval = _FORMS[number](raw_arg, code, slots)
        if op == "CALL":
            names = [a for n, a in before if opcode.opname[n] in _NAMES_OF_KEYWORDS]
            argval = code.co_consts[names[0]] if names else ()
        elif op == "MAKE_FUNCTION":
            argval = _function_flags(number, raw_arg, before)
        line = lines.get(offset & ~1)
        instrs.append(Instr(op, arg, argval, begin, end, line, targets[i], before, number, raw_arg, start))
        before = ()
    # A jump may aim at a dropped RESUME or cache: it means the next instruction kept.
    index = {instr.offset: i for i, instr in enumerate(instrs)}
    following = len(instrs) - 1
    for unit in reversed(fused):
        following = index.setdefault(unit.start, following)
    return CodeInfo(code, tuple(instrs), index, tuple(parse_exception_table(code)), slots)


@by_code
def settled_cells(code: types.CodeType) -> frozenset[str]:
    """The cell variables of a function that are set once: no loop, second assignment or `nonlocal` sets them again."""
    stores: dict[str, list[int]] = {name: [] for name in code.co_cellvars}
    info = decode(code)
    for instr in info.instrs:
        if instr.op in ("STORE_DEREF", "DELETE_DEREF") and instr.argval in stores:
            stores[instr.argval].append(instr.offset)
    loops = [(i.target, i.offset) for i in info.instrs if i.target is not None and i.target <= i.offset]
    given = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    inner = {
        name for const in code.co_consts if isinstance(const, types.CodeType) for name in _set_outside(const)
    }
    return frozenset(
        name
        for name, at in stores.items()
        if len(at) <= (name not in given)
        and name not in inner
        and not any(start <= offset <= end for offset in at for start, end in loops)
    )


def _set_outside(code: types.CodeType) -> set[str]:
    """The free variables that a function, or one inside of it, sets (`nonlocal`)."""
    free = set(code.co_freevars)
    own = {i.argval for i in decode(code).instrs if i.op in ("STORE_DEREF", "DELETE_DEREF")}
    inner = {
        name for const in code.co_consts if isinstance(const, types.CodeType) for name in _set_outside(const)
    }
    return free & (own | inner)


@by_code
def returns_nothing(code: types.CodeType) -> bool:
    """Whether a function returns None or False, whatever happens."""
    info = decode(code)
    given = [(a, b) for a, b in itertools.pairwise(info.instrs) if b.op == "RETURN_VALUE"]
    aims = {info.at(instr.target).offset for instr in info.instrs if instr.target is not None}
    return all(a.op == "LOAD_CONST" and not a.argval and b.offset not in aims for a, b in given)
