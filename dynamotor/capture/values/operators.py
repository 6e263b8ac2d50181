"""What Python calls the two sides of an operator, and how it refuses one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

_NAMES = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "lshift",
    "rshift",
    "and_",
    "or_",
    "xor",
]
_BINARY = {getattr(operator, n): (f"__{n.strip('_')}__", f"__r{n.strip('_')}__") for n in _NAMES}
_BINARY[divmod] = ("__divmod__", "__rdivmod__")
INPLACE = {
    getattr(operator, "i" + n.strip("_")): (f"__i{n.strip('_')}__", getattr(operator, n)) for n in _NAMES
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
_SYMBOLS = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.lt: "<",
    operator.gt: ">",
    operator.le: "<=",
    operator.ge: ">=",
    operator.mod: "%",
    operator.pow: "** or pow()",
    operator.xor: "^",
    operator.lshift: "<<",
    operator.rshift: ">>",
    divmod: "divmod()",
    operator.matmul: "@",
    operator.floordiv: "//",
    operator.and_: "&",
    operator.or_: "|",
}

IN_C = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def c_name(cls: type) -> str:
    """What CPython's messages call a class: one that C defines by its module as well."""
    with_module = cls.__flags__ & IN_C and cls.__module__ != "builtins"
    return f"{cls.__module__}.{cls.__name__}" if with_module else cls.__name__


_REPEATED = ("list", "tuple", "str", "bytes", "collections.deque")


def refusal(op: Callable[..., Any], augmented: str, left: str, right: str) -> str:
    """What CPython says of an operator that two types do not have."""
    if op is operator.add and left in ("list", "tuple", "str"):
        return f'can only concatenate {left} (not "{right}") to {left}'
    if op is operator.mul and (left in _REPEATED or right in _REPEATED):
        return f"can't multiply sequence by non-int of type '{right if left in _REPEATED else left}'"
    if op in COMPARE:
        return f"'{_SYMBOLS[op]}' not supported between instances of '{left}' and '{right}'"
    symbol = "**" if op is operator.pow and augmented else _SYMBOLS.get(op, op.__name__)
    return f"unsupported operand type(s) for {symbol}{augmented}: '{left}' and '{right}'"


def special_name(op: Callable[..., Any], reflected: bool) -> str:
    """The special method of one operand: the left one's, or (reflected) the right one's."""
    return INPLACE[op][0] if op in INPLACE else (COMPARE if op in COMPARE else _BINARY)[op][reflected]
