"""What Python calls the two sides of an operator, and how it refuses one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

# In-place operators, and their equals where the left side has no such method.
_NAMES = "add sub mul truediv floordiv mod pow matmul lshift rshift and_ or_ xor"
INPLACE = {getattr(operator, "i" + name.strip("_")): getattr(operator, name) for name in _NAMES.split()}
SYMBOLS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "@": operator.matmul,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "/=": operator.itruediv,
    "//=": operator.ifloordiv,
    "%=": operator.imod,
    "**=": operator.ipow,
    "@=": operator.imatmul,
    "<<=": operator.ilshift,
    ">>=": operator.irshift,
    "&=": operator.iand,
    "|=": operator.ior,
    "^=": operator.ixor,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}
COMPARE = {
    operator.lt: ("__lt__", "__gt__"),
    operator.gt: ("__gt__", "__lt__"),
    operator.le: ("__le__", "__ge__"),
    operator.ge: ("__ge__", "__le__"),
    operator.eq: ("__eq__", "__eq__"),
    operator.ne: ("__ne__", "__ne__"),
}
UNARY = {operator.neg: "__neg__", operator.pos: "__pos__", operator.invert: "__invert__"}
IN_C = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def c_name(cls: type) -> str:
    """What CPython's messages call a class: one that C defines by its module as well."""
    with_module = cls.__flags__ & IN_C and cls.__module__ != "builtins"
    return f"{cls.__module__}.{cls.__name__}" if with_module else cls.__name__


_BARE: tuple[Any, ...] = (list, tuple, str, bytes, dict, set, frozenset, int, float, complex, type(None))


def like(cls: type) -> Any:
    """An object for which CPython's messages are those for an instance of a class."""
    base = next((base for base in cls.__mro__ if base in _BARE), None)
    return cls() if cls is base else type(c_name(cls), () if base in (None, type(None)) else (base,), {})()


def special_name(op: Callable[..., Any], reflected: bool) -> str:
    """The special method of one operand: the left one's, or (reflected) the right one's."""
    plain = f"__{'r' * reflected}{op.__name__.strip('_')}__"
    return COMPARE[op][reflected] if op in COMPARE else plain
