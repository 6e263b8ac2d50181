"""How each supported version of CPython differs in bytecode from the others: data only.

`bytecode.py` decodes by these tables into instructions that are the same for all versions; `assembler.py` and
`resume.py` write by them. A new version of CPython is a row of `VERSIONS`, and the names that it added.
"""

from __future__ import annotations

import dis
import importlib
import opcode
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Version:
    """The conventions of one version of CPython."""

    null_first: bool  # a call's NULL is below the callable, else above it
    compare_shift: int  # bits of COMPARE_OP's argument below the operator
    compare_bool: int  # the bit of it that asks for a bool; 0: there is none
    method_bit: bool  # LOAD_ATTR has a bit for methods, else LOAD_METHOD is an opcode of its own
    send_keeps: bool  # the receiver stays below the result of SEND
    loop_end: tuple[str, ...]  # stand where an exhausted FOR_ITER leaves its loop to
    exit_depth: int  # position of __exit__ from the top of the stack in WITH_EXCEPT_START
    call: tuple[str, ...]  # what calls, each with the number of arguments
    call_star: tuple[str, ...]  # what calls with a tuple of arguments and no keywords
    load_slot: str  # loads a slot as it is: a cell, not its contents
    subscript: tuple[str, int]
    free_flag: int  # a bit of co_flags that CPython leaves free (csrc/python_compat.h)


_3_11 = Version(
    null_first=True,
    compare_shift=0,
    compare_bool=0,
    method_bit=False,
    send_keeps=False,
    loop_end=(),
    exit_depth=4,
    call=("PRECALL", "CALL"),
    call_star=("CALL_FUNCTION_EX",),
    load_slot="LOAD_CLOSURE",
    subscript=("BINARY_SUBSCR", 0),
    free_flag=1 << 27,
)
_3_12 = replace(
    _3_11, compare_shift=4, method_bit=True, send_keeps=True, loop_end=("END_FOR",), call=("CALL",)
)
_3_13 = replace(
    _3_12,
    null_first=False,
    compare_shift=5,
    compare_bool=16,
    loop_end=("END_FOR", "POP_TOP"),
    load_slot="LOAD_FAST",
)
_3_14 = replace(
    _3_13,
    loop_end=("END_FOR", "POP_ITER"),
    exit_depth=5,
    call_star=("PUSH_NULL", "CALL_FUNCTION_EX"),
    subscript=("BINARY_OP", 26),
    free_flag=1 << 28,
)
VERSIONS = {(3, 11): _3_11, (3, 12): _3_12, (3, 13): _3_13, (3, 14): _3_14}
VERSION = VERSIONS[min(sys.version_info[:2], max(VERSIONS))]

# Raw opcode -> the name that the interpreter knows it by, where nothing but the name differs.
RENAMED = {
    "JUMP_FORWARD": "JUMP",
    "JUMP_BACKWARD": "JUMP",
    "JUMP_BACKWARD_NO_INTERRUPT": "JUMP",
    "LOAD_FAST_CHECK": "LOAD_FAST",
    "LOAD_SMALL_INT": "LOAD_CONST",
    "LOAD_ASSERTION_ERROR": "LOAD_COMMON_CONSTANT",
    "POP_ITER": "POP_TOP",
    "CALL_KW": "CALL",
    "SET_FUNCTION_ATTRIBUTE": "MAKE_FUNCTION",
    **{
        f"POP_JUMP_{way}_IF_{test}": f"POP_JUMP_IF_{test}"
        for way in ("FORWARD", "BACKWARD")
        for test in ("FALSE", "TRUE", "NONE", "NOT_NONE")
    },
}
# Raw opcodes that mean nothing to the interpreter.
DROPPED = frozenset({"CACHE", "RESUME", "NOT_TAKEN"})

INTRINSICS = {
    "CALL_INTRINSIC_1": {
        1: "PRINT_EXPR",
        2: "IMPORT_STAR",
        3: "STOPITERATION_ERROR",
        4: "ASYNC_GEN_WRAP",
        5: "UNARY_POSITIVE",
        6: "LIST_TO_TUPLE",
    },
    "CALL_INTRINSIC_2": {1: "PREP_RERAISE_STAR"},
}


def _both(first: str, second: str) -> Callable[[int], tuple[tuple[str, int], ...]]:
    """The two instructions on locals of one that names them in four bits each."""
    return lambda arg: ((first, arg >> 4), (second, arg & 15))


# Opcode -> the simpler instructions (name, argument) that do the same for an argument. Where there are two, the
# second has the odd offset behind the first one's, so that a frame can be cut between them.
PARTS: dict[str, Callable[[int], tuple[tuple[str, int], ...]]] = {
    # A borrowed reference is one that the compiler of CPython knows to need no count; a copy elsewhere needs one.
    "LOAD_FAST_BORROW": lambda arg: (("LOAD_FAST", arg),),
    "RETURN_CONST": lambda arg: (("LOAD_CONST", arg), ("RETURN_VALUE", 0)),
    "LOAD_FAST_LOAD_FAST": _both("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": _both("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": _both("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": _both("STORE_FAST", "STORE_FAST"),
}
PAIRS = frozenset(name for name in PARTS if name.count("_FAST") == 2)
if VERSION.compare_bool:
    PARTS["COMPARE_OP"] = lambda arg: (
        (("COMPARE_OP", arg - VERSION.compare_bool), ("TO_BOOL", 0))
        if arg & VERSION.compare_bool
        else (("COMPARE_OP", arg),)
    )

_TESTS = ("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "UNARY_NOT")
# Opcode -> opcodes that it is one instruction with where it stands right before them: the interpreter's jumps and
# UNARY_NOT take any value, its CALL carries the names of keywords, and its MAKE_FUNCTION makes the whole function.
JOINED: dict[str, tuple[str, ...]] = {
    "KW_NAMES": ("PRECALL", "CALL"),
    "PRECALL": ("CALL",),
    "LOAD_CONST": ("CALL_KW",),
    "MAKE_FUNCTION": ("SET_FUNCTION_ATTRIBUTE",),
    "SET_FUNCTION_ATTRIBUTE": ("SET_FUNCTION_ATTRIBUTE",),
    "TO_BOOL": _TESTS,
}
# Opcodes that need a companion in front of them, unlike the interpreter's.
NEEDS_BEFORE = dict.fromkeys(_TESTS, "TO_BOOL") if "TO_BOOL" in dis.opmap else {}

_caches: Any = vars(opcode)["_inline_cache_entries"]
CACHES: tuple[int, ...] = (
    tuple(_caches.get(name, 0) for name in opcode.opname[:256])
    if isinstance(_caches, dict)
    else tuple(_caches)
)
TAKES_ARGUMENT = tuple(
    number in dis.hasarg if hasattr(dis, "hasarg") else number >= dis.HAVE_ARGUMENT for number in range(256)
)
COMMON_CONSTANTS: tuple[Any, ...] = tuple(getattr(opcode, "_common_constants", ())) or (AssertionError,)
SPECIAL_METHODS: tuple[str, ...] = tuple(getattr(opcode, "_special_method_names", ()))
BINARY_OPERATORS: tuple[str, ...] = tuple(text for _, text in vars(opcode)["_nb_ops"])
# What CPython itself puts into the name space of a class.
CLASS_NAMES = frozenset({"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__type_params__",
                         "__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"})  # fmt: skip


def _template_classes() -> tuple[type, type]:
    try:
        library = importlib.import_module("string.templatelib")
    except ImportError:  # before 3.14: no object is of these classes
        return type("Template", (), {}), type("Interpolation", (), {})
    return library.Template, library.Interpolation


# The classes of t-strings and of what stands in their braces.
TEMPLATE_CLASSES = _template_classes()
