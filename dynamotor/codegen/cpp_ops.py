"""C++ text of each operation of the loop IR: one row an op, the same text for scalars and vectors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..graph.sizes import Dim
from ..lower.ir import BOOL, F32, F64, I32, I64, Expr, neutral
from .cpp_narrow import BITS, NarrowLanes
from .scopes import no_text

SCALAR = {F32: "float", F64: "double", I32: "int", I64: "i64", BOOL: "int"}
VECTOR = {F32: "F", F64: "D", I32: "I", I64: "L", BOOL: "I"}
MEMORY = {
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "int",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "u8",
}

TEXT: dict[str, str] = {
    "add": "{0}+{1}",
    "sub": "{0}-{1}",
    "mul": "{0}*{1}",
    "div": "{0}/{1}",
    "fma": "fma_({0},{1},{2})",
    "neg": "-{0}",
    "and": "{0}&{1}",
    "or": "{0}|{1}",
    "xor": "{0}^{1}",
    "shr": "{0}>>{1}",
    "shl": "{0}<<{1}",
    "not": "~{0}",
    "bitnot": "~{0}",
    "abs": "abs_({0})",
    "max": "max_({0},{1})",
    "min": "min_({0},{1})",
    "select": "sel({0},{1},{2})",
    "round": "nearbyint_({0})",
    "normal_cdf": "(erf_({0}*0.7071067690849304f)+1.0f)*0.5f",
}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
ADDS_NOTHING = frozenset(("mul", "div", *COMPARISONS))  # readers that cannot become a multiply-add
for _name in COMPARISONS:
    TEXT[_name] = f"{_name}({{0}},{{1}})"
for _name in (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "tanh",
    "erf",
    "erfc",
    "sigmoid",
    "floor",
    "ceil",
    "trunc",
    "lgamma",
):
    TEXT[_name] = f"{_name}_({{0}})"
for _name in ("pow", "atan2", "hypot", "fmod", "copysign"):
    TEXT[_name] = f"{_name}_({{0}},{{1}})"


def ctype(dtype: torch.dtype, width: int) -> str:
    """The C++ type of a value of a compute type in `width` lanes."""
    if type(width) is NarrowLanes:
        return f"{width.vector}{width:d}"
    return SCALAR[dtype] if width == 1 else f"{VECTOR[dtype]}{width}"


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A number of a compute type; in parentheses where it has a sign, because `a--1` is no difference in
    C.
    """
    if dtype is BOOL:
        return "(-1)" if value else "0"
    if not dtype.is_floating_point:
        if value in (
            -(1 << 63),
            -(1 << 31),
        ):  # a sign is no part of a number in C, which has no such positive one
            return f"({value + 1}{'l' if dtype is I64 else ''}-1)"
        return _in_parentheses(f"{value}l" if dtype is I64 else str(value))
    suffix = "f" if dtype is F32 else ""
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(value) or (dtype is F32 and abs(value) > 3.4028235677973366e38):
        return f"({'-' if value < 0 else ''}__builtin_inf{suffix}())"
    if dtype is F32:
        value = torch.tensor(value, dtype=F32).item()
    return _in_parentheses(f"{value!r}{suffix}")


def _in_parentheses(number: str) -> str:
    return f"({number})" if number.startswith("-") else number


def operation(
    e: Expr, operands: list[str], result: str, width: int, number: Callable[[Dim], str] = str
) -> str:
    """Text of e over operands that are already of its width; `number` gives the text of a size."""
    name, source = e.op, e.args[0].dtype if e.args and isinstance(e.args[0], Expr) else e.dtype
    if name == "cast":
        return cast_text(operands[0], source, e.dtype, result, width)
    if name == "bits":
        return f"bits<{result}>({operands[0]})"
    if type(width) is NarrowLanes and (name == "round_to" or e.dtype is F32 and name in BITS):
        return BITS[name].format(*operands) if name != "round_to" else operands[0]
    if name == "round_to":
        memory = e.args[1]
        if memory is torch.bfloat16:
            return f"round_bf({operands[0]})"
        return (
            f"round_h({operands[0]})"
            if memory is torch.float16
            else f"wrap_<{MEMORY[memory]}>({operands[0]})"
        )
    if name in ("floordiv", "rem", "truncdiv"):
        return f"{name}{'f' if e.dtype.is_floating_point else 'i'}_({', '.join(operands)})"
    if name == "wrap_index":
        return f"at({operands[0]},{number(e.args[1])},{str(e.args[2]).lower()},outside)"
    text = TEXT.get(name)
    if text is None:
        raise no_text(name, "C++", "cpp_ops.py")
    return text.format(*operands)


def cast_text(x: str, source: torch.dtype, to: torch.dtype, result: str, width: int) -> str:
    """Conversion between compute types."""
    if source is BOOL:
        x = f"({x})" if x.startswith("-") else x  # true is -1
        return f"-{x}" if to is I32 else f"cvt<{result}>(-{x})"
    if to is BOOL:
        return f"ne({x},bc<{ctype(source, width)}>(0))"
    if source.is_floating_point and not to.is_floating_point:
        return f"whole<{result}>({x})"
    return f"cvt<{result}>({x})"


def reduce_start(kind: str, dtype: torch.dtype, width: int = 1) -> str:
    """The neutral element, in so many lanes."""
    if type(width) is NarrowLanes:
        return width.neutral(kind)
    return literal(neutral(kind, dtype), dtype)


def kept_type(dtype: torch.dtype, width: int) -> str:
    """The C++ type of memory for accumulators of `width` lanes."""
    return width.element if type(width) is NarrowLanes else ctype(dtype, 1)


# A result so far with another value. Of zeros the first stays, as in eager; no test of the result delays it.
COMBINE = {
    "sum": "{0}+{1}",
    "prod": "{0}*{1}",
    "max": "max_({1},{0})",
    "min": "min_({1},{0})",
    "logaddexp": "logaddexp_({0},{1})",
    "any": "{0}|{1}",
    "all": "{0}&{1}",
}
ACROSS_LANES = {"sum": "hsum", "prod": "hprod", "max": "hmax", "min": "hmin", "any": "hor", "all": "hand"}
