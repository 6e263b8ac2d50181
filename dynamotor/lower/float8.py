"""Conversions from and to float8. Loops move its numbers as bytes: the value of a float8 tensor is its bits.

>>> float32_of(load_of_e4m3, torch.float8_e4m3fn)      # exact
>>> float8_of(x, torch.float8_e5m2, by_instruction=False)      # rounded to nearest even, as eager
"""

from __future__ import annotations

import functools
import math

import torch

from .ir import F32, I32, Expr, cast, compare, const, make, op, select

# Bits of the mantissa, bias of the exponent, and the largest finite number's bits.
FORMATS = {torch.float8_e4m3fn: (3, 7, 126), torch.float8_e5m2: (2, 15, 123)}
# Where numbers begin that are rounded to none that is finite.
BEYOND = {torch.float8_e4m3fn: ("gt", 464.0), torch.float8_e5m2: ("ge", 61440.0)}


def _whole(number: int) -> Expr:
    return const(number, I32)


def float32_of(byte: Expr, dtype: torch.dtype) -> Expr:
    """The number of a float8 type that has these bits."""
    mantissa, bias, largest = FORMATS[dtype]
    magnitude = op("and", byte, _whole(127))
    scaled = op("mul", magnitude, _whole(1 << (23 - mantissa)))
    value = op("bits", op("add", scaled, _whole((127 - bias) << 23)), dtype=F32)
    small = op("mul", cast(magnitude, F32), const(2.0 ** (1 - bias - mantissa), F32))  # no hidden bit
    value = select(compare("lt", magnitude, _whole(1 << mantissa)), small, value)
    beyond = const(math.nan, F32)
    if largest == 123:
        beyond = select(compare("eq", magnitude, _whole(124)), const(math.inf, F32), beyond)
    value = select(compare("le", magnitude, _whole(largest)), value, beyond)
    return select(compare("gt", byte, _whole(127)), op("neg", value), value)


def has_float8(device: torch.device) -> bool:
    """Whether a GPU (or the interpreter of its kernels) has an instruction that rounds to float8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def float8_of(x: Expr, dtype: torch.dtype, by_instruction: bool) -> Expr:
    """The bits of a float32 in a float8 type. An instruction gives the largest number for larger ones."""
    bits = op("bits", x, dtype=I32)
    sign = op("and", op("shr", bits, _whole(24)), _whole(128))
    name, limit = BEYOND[dtype]
    too_large = compare(name, op("abs", x), const(limit, F32))
    beyond = _whole(_bits_of_infinity(dtype))
    inside = _is_within(x, limit)
    if by_instruction:
        found = make("float8", (x, dtype), I32)
        is_last = beyond.args[0] == FORMATS[dtype][2]
        return found if inside or is_last else select(too_large, op("add", beyond, sign), found)
    found = _rounded(op("and", bits, _whole(0x7FFFFFFF)), dtype)
    if not inside:
        found = select(too_large, beyond, found)
    return op("add", select(compare("ne", x, x), _whole(127), found), sign)


def _rounded(bits: Expr, dtype: torch.dtype) -> Expr:
    """The bits of a positive float32, of its finite neighbour in a float8 type."""
    mantissa, bias, _ = FORMATS[dtype]
    drop = 23 - mantissa
    odd = op("and", op("shr", bits, _whole(drop)), _whole(1))
    rounded = op("add", op("add", bits, _whole((1 << (drop - 1)) - 1)), odd)
    normal = op("sub", op("shr", rounded, _whole(drop)), _whole((127 - bias) << mantissa))
    # Numbers without a hidden bit: the last bit of this sum counts them, and the addition rounds.
    unit = 2.0 ** (24 - bias - mantissa)
    summed = op("add", op("bits", bits, dtype=F32), const(unit, F32))
    small = op("sub", op("bits", summed, dtype=I32), _whole(_bits(unit)))
    return op("and", select(compare("lt", bits, _whole((128 - bias) << 23)), small, normal), _whole(127))


def _bits(number: float) -> int:
    return int(torch.tensor(number).view(torch.int32))


@functools.cache
def _bits_of_infinity(dtype: torch.dtype) -> int:
    """Eager's float8 of infinity: versions differ."""
    return int(torch.tensor(math.inf, device="cpu").to(dtype).view(torch.uint8))


def _is_within(x: Expr, limit: float) -> bool:
    """Whether an expression is clamped to finite numbers (or NaN)."""
    above = below = False
    while x.op == "select" and x.args[1].op == "const" and x.args[0].op in ("lt", "gt"):
        (tested, bound), value = x.args[0].args, x.args[1]
        if tested is not x.args[2] or bound is not value:
            return False
        above |= x.args[0].op == "gt" and abs(value.args[0]) < limit
        below |= x.args[0].op == "lt" and abs(value.args[0]) < limit
        x = x.args[2]
    return above and below
