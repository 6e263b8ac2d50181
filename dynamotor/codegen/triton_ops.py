"""Triton text of each operation of the loop IR: one row an op, and the helper functions that all kernels may
call.

>>> operation(op("mul", x, const(2.0, F32)), ["v1", "c0"])
'v1 * c0'

The same text runs on the GPU and, under TRITON_INTERPRET=1, in Triton's interpreter.
"""

from __future__ import annotations

import inspect
import math

import torch

from ..graph.sizes import Dim, Size, divides
from ..lower.ir import BOOL, COMPUTE_TYPE, F32, F64, I32, I64, Expr, neutral
from ..lower.whole_ranges import range_of
from .scopes import no_text

COMPUTE = {F32: "tl.float32", F64: "tl.float64", I32: "tl.int32", I64: "tl.int64", BOOL: "tl.int1"}
POINTER = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
MEMORY = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

ALIGNED = 16  # what Triton's code profits from knowing of an argument

TEXT: dict[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "fma": "tl.fma({0}, {1}, {2})",
    "neg": "-{0}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "shr": "{0} >> {1}",
    "shl": "{0} << {1}",
    "bitnot": "~{0}",
    "not": "{0} == 0",
    "abs": "tl.abs({0})",
    "max": "maximum({0}, {1})",
    "min": "minimum({0}, {1})",
    "select": "tl.where({0}, {1}, {2})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "normal_cdf": "normal_cdf({0})",
    "exp": "tl.exp({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "round": "libdevice.rint({0})",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
}
_ONE = """exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh asinh acosh atanh
tanh erf erfc trunc lgamma"""
for _name in _ONE.split():
    TEXT[_name] = f"libdevice.{_name}({{0}})"
for _name in ("pow", "atan2", "hypot", "fmod", "copysign"):
    TEXT[_name] = f"libdevice.{_name}({{0}}, {{1}})"
for _name in ("floordiv", "rem", "truncdiv"):
    TEXT[f"{_name}_int"] = f"{_name}_int({{0}}, {{1}})"
    TEXT[f"{_name}_float"] = f"{_name}_float({{0}}, {{1}})"

# Functions that generated kernels call; Triton compiles only those that are called. ALIGNED is given with
# each build: whether all pointers are multiples of 16.
HELPERS = '''
@triton.jit
def maximum(a, b):
    """The larger one; NaN when either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def overlap():
    """Let the next kernel's programs start, and wait until all before this one have ended: nothing may touch
    memory before.
    """
    text: tl.constexpr = "griddepcontrol.launch_dependents; griddepcontrol.wait; // $0"
    tl.inline_asm_elementwise(text, "=r", [], dtype=tl.int32, is_pure=False, pack=1)

@triton.jit
def float_of_byte(x):
    """A small integer as the last bits of 1.5 * 2 ** 23: conversions of bytes have few lanes."""
    return (x + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0

@triton.jit
def float8_bits(x, KIND: tl.constexpr):
    """The bits of a float32 in a float8 type. One number an instruction: ptxas 12.8 lets code that reads
    half of a pair run before the pair is there, where two pairs are joined for a store.
    """
    text: tl.constexpr = (
        "{ .reg .b16 pair; cvt.rn.satfinite." + KIND + "x2.f32 pair, 0f00000000, $1; cvt.u32.u16 $0, pair; }"
    )
    return tl.inline_asm_elementwise(text, "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)

@triton.jit
def plus(a, b):
    return a + b

@triton.jit
def product(a, b):
    return a * b

@triton.jit
def exp_sum(top, total, x):
    """The sum of exponentials relative to a running maximum `top`, with that of x; and the maximum to which
    it is relative.
    """
    best = maximum(top, x)
    down = tl.exp(tl.where(x == top, 0.0, -tl.abs(x - top)))
    return best, tl.where(x > top, total * down + 1, total + down)

@triton.jit
def exp_sums(top, total, x, RUN: tl.constexpr):
    """The same where each lane of `top` takes many elements of x, in runs of RUN neighbours: the maximum
    moves once for them.
    """
    LANES: tl.constexpr = top.shape[1]
    WIDTH: tl.constexpr = RUN if ALIGNED else 1
    runs = tl.reshape(x, [x.shape[1] // (LANES * WIDTH), LANES, WIDTH])
    best = maximum(top, tl.expand_dims(tl.reduce(tl.reduce(runs, 2, maximum), 0, maximum), 0))
    base = tl.where(best == float("-inf"), 0.0, best)
    added = tl.sum(tl.sum(exponential(runs - tl.expand_dims(base, 2)), 2), 0)
    return best, total * exponential(top - base) + tl.expand_dims(added, 0)

@triton.jit
def exponential(x):
    """exp(x); results below the smallest normal number are 0."""
    return libdevice.exp2(x * 1.4426950408889634)

@triton.jit
def logaddexp(a, b):
    """log(exp(a) + exp(b)); two infinities of one sign are that infinity."""
    top = maximum(a, b)
    down = minimum(a, b)
    finite = (down != top) | (top - top == 0)
    return tl.where(finite, libdevice.log1p(tl.exp(tl.where(finite, down - top, 0.0))) + top, top)

@triton.jit
def last_largest(a, i, b, j):
    """The larger of two with its position, the later of equals; a NaN counts as larger than all."""
    take = (b != b) | ((a == a) & (b >= a))
    return tl.where(take, b, a), tl.where(take, j, i)

@triton.jit
def last_smallest(a, i, b, j):
    take = (b != b) | ((a == a) & (b <= a))
    return tl.where(take, b, a), tl.where(take, j, i)

@triton.jit
def floordiv_int(a, b):
    """Division by a positive or negative number, rounded down."""
    q = a // b
    r = a - q * b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q)

@triton.jit
def truncdiv_int(a, b):
    return a // b

@triton.jit
def rem_int(a, b):
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)

@triton.jit
def rem_float(a, b):
    r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)

@triton.jit
def floordiv_float(a, b):
    """As aten's floor division: exact where a - fmod(a, b) divides."""
    r = libdevice.fmod(a, b)
    q = libdevice.div_rn(a - r, b)
    q = tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q)
    down = tl.floor(q)
    down = tl.where(q - down > 0.5, down + 1, down)
    zero = libdevice.copysign(q * 0, libdevice.div_rn(a, b))
    return tl.where(b == 0, libdevice.div_rn(a, b), tl.where(q == 0, zero, down))

@triton.jit
def random_word(seed, stream, linear):
    """The 32 bits of element `linear` of dynamotor::rand: Philox4x32-10, counter (linear // 4, 0, stream, 0),
    lane linear % 4.
    """
    block = (linear // 4).to(tl.uint32)
    zero = block * 0
    a, b, c, d = tl.philox(seed, block, zero, zero + stream.to(tl.uint32), zero)
    lane = (linear % 4).to(tl.int32)
    return tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))

@triton.jit
def random_words(seed, stream, block):
    """Those of elements 4 * block ... 4 * block + 3 for each counter of the tile, along its last axis."""
    zero = block * 0
    a, b, c, d = tl.philox(seed, block, zero, zero + stream.to(tl.uint32), zero)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))

@triton.jit
def uniform(word):
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08

@triton.jit
def normal_cdf(x):
    """The standard normal distribution to a relative error of 4e-6: 2 ** p(|x|) is the mass beyond |x| on
    one side.

    p is the minimax polynomial for |x| <= 6; behind that it keeps falling, faster than the function does.
    """
    t = tl.abs(x)
    p = -1.7937809e-06 * t + 6.072617e-05
    p = p * t - 0.00092318584
    p = p * t + 0.008476848
    p = p * t - 0.05389094
    p = p * t - 0.45854157
    p = p * t - 1.1512144
    beyond = libdevice.exp2(p * t - 1.0)
    return tl.where(x < 0, beyond, 1.0 - beyond)
'''


def lines_of(text: str) -> list[str]:
    """The lines of a text that is indented as the code around it."""
    return inspect.cleandoc(text).splitlines()


def mark(number: Dim | str) -> str:
    """The text of a number that other sizes may change (an integer, or a float32 as text), for
    triton_sizes.py to settle. An expression of sizes stands behind `@` and its known divisor.
    """
    if type(number) is Size:
        return f"⟦@{ALIGNED if divides(ALIGNED, number) else 1} {number!r}⟧"
    return f"⟦{number}⟧"


def unmarked(text: str) -> str:
    """The text with all numbers in their places."""
    return text.replace("⟦", "").replace("⟧", "").replace("+ -", "- ")


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A number as Python text."""
    if dtype.is_floating_point:
        if math.isnan(value):
            return 'float("nan")'
        if math.isinf(value) or (dtype is F32 and abs(value) > 3.4028235677973366e38):
            return f'float("{"-" if value < 0 else ""}inf")'
        return repr(torch.tensor(value, dtype=dtype).item())
    return repr(bool(value)) if dtype is BOOL else repr(int(value))


def operation(e: Expr, operands: list[str]) -> str:
    """Text of e over its operands' names."""
    name, source = e.op, e.args[0].dtype if e.args and isinstance(e.args[0], Expr) else e.dtype
    if name == "cast":
        if e.dtype is F32 and source is I32 and _is_byte(e.args[0]):
            return f"float_of_byte({operands[0]})"
        return f"({operands[0]} != 0)" if e.dtype is BOOL else f"{operands[0]}.to({COMPUTE[e.dtype]})"
    if name == "round_to":
        return f"{operands[0]}.to({MEMORY[e.args[1]]}).to({COMPUTE[COMPUTE_TYPE[e.args[1]]]})"
    if name == "neg" and source.is_floating_point:  # Triton's is 0 - x, which is 0 for 0
        return f"{operands[0]} * -1.0"
    if name == "bits":
        return f"({operands[0]}).to({COMPUTE[e.dtype]}, bitcast=True)"
    if name == "float8":
        return f'float8_bits({operands[0]}, "{FLOAT8[e.args[1]]}")'
    if name in ("floordiv", "rem", "truncdiv"):
        name += "_float" if source.is_floating_point else "_int"
    if name == "fma":  # takes a number for one of float32
        kind = COMPUTE[e.dtype]
        operands = [
            f"tl.full([], {text}, {kind})" if a.op == "const" else text
            for a, text in zip(e.args, operands, strict=True)
        ]
    if name in ("max", "min") and not source.is_floating_point:
        return f"tl.{name}imum({operands[0]}, {operands[1]})"
    text = TEXT.get(name)
    if text is None:
        raise no_text(name, "Triton", "triton_ops.py")
    return text.format(*operands)


def _is_byte(e: Expr) -> bool:
    """Whether an integer is within those of bytes, with or without sign."""
    found = range_of(e)
    return found is not None and e.op != "const" and found[0] >= -128 and found[1] <= 255


def word_test(e: Expr) -> tuple[Expr, str] | None:
    """A random number compared with a constant, as (the number, text that compares its 32 bits {0} instead).

    u = (word >> 8) * 2 ** -24, so u < c is word < ceil(c * 2 ** 24) << 8.
    """
    if e.op not in ("lt", "le", "gt", "ge") or e.args[0].op != "rand" or e.args[1].op != "const":
        return None
    scaled = torch.tensor(e.args[1].args[0], dtype=F32).item() * 2.0**24
    if not 0 < scaled < 2**24 - 1:
        return None
    limit = math.ceil(scaled) if e.op in ("lt", "ge") else math.floor(scaled) + 1
    return e.args[0], f"{{0}} {'<' if e.op in ('lt', 'le') else '>='} {limit << 8}"


def reduce_start(kind: str, dtype: torch.dtype) -> str:
    """The neutral element."""
    return literal(neutral(kind, dtype), dtype)


def combine(kind: str, dtype: torch.dtype, a: str, b: str) -> str:
    """One step of a reduction."""
    if kind in ("max", "min"):
        if dtype is BOOL:
            return f"{a} | {b}" if kind == "max" else f"{a} & {b}"
        return f"{kind}imum({a}, {b})" if dtype.is_floating_point else f"tl.{kind}imum({a}, {b})"
    return {"sum": f"{a} + {b}", "prod": f"{a} * {b}", "any": f"{a} | {b}", "all": f"{a} & {b}"}[kind]


# Functions of two elements (or pairs of them) that tl.associative_scan takes.
SCAN_BY = {
    "sum": "plus",
    "prod": "product",
    "max": "maximum",
    "min": "minimum",
    "logaddexp": "logaddexp",
    "argmax": "last_largest",
    "argmin": "last_smallest",
}


def across_tile(kind: str, dtype: torch.dtype, tile: str, axis: int) -> str:
    """A tile reduced along one axis, which stays with size 1."""
    if dtype is BOOL:
        over = "max" if kind in ("any", "max", "sum") else "min"
        text = f"(tl.{over}({tile}.to(tl.int32), {axis}) != 0)"
    elif kind == "sum":
        text = f"tl.sum({tile}, {axis})"
    elif kind == "prod":
        text = f"tl.reduce({tile}, {axis}, product)"
    elif dtype.is_floating_point:
        text = f"tl.reduce({tile}, {axis}, {kind}imum)"
    else:
        text = f"tl.{kind}({tile}, {axis})"
    return f"tl.expand_dims({text}, {axis})"
