"""The Triton text of `dynamotor::attend`: several programs share a head's keys ("flash decoding", Dao et al.,
2023), and blocks of keys before the first and behind the last that the mask shows are not read.

Program c of a head goes through its blocks c, c + splits, ...: where a cache is filled to a part, each has as
many filled ones. It looks at its part of the mask first: a loop without branches can load ahead. With more
than one program, another kernel puts their parts together.

>>> parts(torch.bfloat16, None, rows=4, widths=(64, 64), strides=(64,) * 16, splits=8, scale=0.125).source
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.cache import digest
from .triton_kernel import TritonFunction
from .triton_ops import POINTER

MOST_SPLITS, WARPS = 64, 4
STAGES = 2  # a third leaves room for fewer programs: 17 to 34 % more time for 32,768 keys on an H200
MANY = 8  # blocks of a mask that are looked at together
WHOLE = 256  # keys that one program has in registers, by more warps: it waits for memory once
_TRITON = {torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
_PARTS = """
@triton.jit
def dm_attend(q, k, v, mask, out, heads, length, splits, {strides}):
    pid = tl.program_id(0)
    c = pid % splits
    g = pid // splits
    b = (g // heads).to(tl.int64)
    h = (g % heads).to(tl.int64)
    rows = tl.arange(0, {padded})
    e = tl.arange(0, {ep})
    f = tl.arange(0, {fp})
    q += b * q0 + h * q1
    k += b * k0 + h * k1
    v += b * v0 + h * v1
    mask += b * m0 + h * m1
    qt = tl.load(q + rows[:, None] * q2 + e[None, :] * q3, (rows < {rows})[:, None] & (e < {e})[None, :], 0.0)
    top = tl.full([{padded}], float("-inf"), tl.float32)
    total = tl.full([{padded}], 0.0, tl.float32)
    acc = tl.full([{padded}, {fp}], 0.0, tl.float32)
    span = splits * {block}
    first = c * {block}
    behind = length
{ends}
    for at in tl.range(first, behind, span):
        keys = at + tl.arange(0, {block})
        inside = (rows < {rows})[:, None] & (keys < length)[None, :]
        places = keys.to(tl.int64)
        there = keys < length
        m = {mask}
        kt = tl.load(k + places[None, :] * k2 + e[:, None], there[None, :] & (e < {e})[:, None], 0.0)
        vt = tl.load(v + places[:, None] * v2 + f[None, :], there[:, None] & (f < {f})[None, :], 0.0)
        s = tl.dot(qt, kt{exact}) * {scale} + m
        high = maximum(top, tl.reduce(s, 1, maximum))
        base = tl.where(high == float("-inf"), 0.0, high)
        p = tl.exp(s - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to({kind}), vt{exact})
        top = high
{end}
"""
# Of one mask for all rows several blocks are looked at together.
_ENDS = """
    shown = length
    behind = 0
    for at in tl.range(first, length, {many} * span):
        starts = at + tl.arange(0, {many}) * span
        keys = starts[:, None] + tl.arange(0, {block})[None, :]
        seen = tl.load(mask + keys.to(tl.int64) * m3, keys < length, float("-inf")) != float("-inf")
        any_seen = tl.max(tl.where(seen, 1, 0), 1) > 0
        shown = tl.minimum(shown, tl.min(tl.where(any_seen, starts, length), 0))
        behind = tl.maximum(behind, tl.max(tl.where(any_seen, starts + 1, 0), 0))
    first = shown
"""
_ENDS_OF_ROWS = """
    shown = length
    behind = 0
    for at in tl.range(first, length, span):
        keys = at + tl.arange(0, {block})
        inside = (rows < {rows})[:, None] & (keys < length)[None, :]
        places = mask + rows[:, None] * m2 + keys.to(tl.int64)[None, :] * m3
        any_seen = tl.max(tl.where(tl.load(places, inside, float("-inf")) != float("-inf"), 1, 0)) > 0
        shown = tl.minimum(shown, tl.where(any_seen, at, length))
        behind = tl.maximum(behind, tl.where(any_seen, at + 1, 0))
    first = shown
"""
_RESULT = """
    known = tl.where(total == 0.0, 1.0, total)
    at = out + b * o0 + h * o1 + rows[:, None] * o2 + f[None, :] * o3
    tl.store(at, (acc / known[:, None]).to({kind}), (rows < {rows})[:, None] & (f < {f})[None, :])
"""
_PART = """
    at = pid.to(tl.int64) * {rows} + rows
    tl.store(out + at[:, None] * {f} + f[None, :], acc, (rows < {rows})[:, None] & (f < {f})[None, :])
    out += tl.num_programs(0).to(tl.int64) * {size}
    tl.store(out + at, top, rows < {rows})
    tl.store(out + tl.num_programs(0) * {rows} + at, total, rows < {rows})
"""
_JOINED = """
@triton.jit
def dm_join(parts, out, heads, splits, {strides}):
    pid = tl.program_id(0)
    r = pid % {rows}
    g = pid // {rows}
    b = (g // heads).to(tl.int64)
    h = (g % heads).to(tl.int64)
    f = tl.arange(0, {fp})
    n = tl.num_programs(0).to(tl.int64) * splits
    s = tl.arange(0, {most})
    at = (g.to(tl.int64) * splits + s) * {rows} + r
    top = tl.load(parts + n * {f} + at, s < splits, float("-inf"))
    total = tl.load(parts + n * {f} + n + at, s < splits, 0.0)
    high = tl.reduce(top, 0, maximum)
    share = tl.exp(top - tl.where(high == float("-inf"), 0.0, high))
    whole = tl.sum(total * share, 0)
    acc = tl.load(parts + at[:, None] * {f} + f[None, :], (s < splits)[:, None] & (f < {f})[None, :], 0.0)
    found = tl.sum(acc * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + b * o0 + h * o1 + r * o2 + f * o3, found.to({kind}), f < {f})
"""


def block_of(dtype: torch.dtype, widths: tuple[int, int]) -> int:
    """Keys of a block: the quickest on an H200 for heads of 64 and 128 halves (128 at 137 µs where 64 take
    160, and 64 at 260 where 128 take 398); as many bytes for others.
    """
    return max(16, min(128, (1 << 13) // _power(max(widths)) * 2 // dtype.itemsize))


def tile_of(dtype: torch.dtype, widths: tuple[int, int], length: int) -> tuple[int, int]:
    """Keys of a block, and warps: a block of all keys where these are few."""
    block, warps = block_of(dtype, widths), WARPS
    times = _power(-(-length // block), 1)
    return (block * times, warps * times) if length <= WHOLE and times <= 4 else (block, warps)


def parts(
    dtype: torch.dtype,
    mask: torch.dtype | None,
    rows: int,
    widths: tuple[int, int],
    strides: Sequence[int],
    splits: int,
    scale: float,
    early: bool = False,
    tile: tuple[int, int] | None = None,
    stages: int = STAGES,
) -> TritonFunction:
    """Of q, k, v, mask, and the result (one split) or the parts: each split's sums, maxima and totals.

    strides: of q, k, v, mask and the result. Its numbers: heads, length, splits, then the strides. early:
    all keys are read, while it is not known yet which of them the mask shows: that saves a wait for memory.
    tile: keys of a block, and warps. stages: depth of the loop's pipeline.
    """
    block, warps = tile or (block_of(dtype, widths), WARPS)
    e, f = widths
    ends = _ENDS if strides[14] == 0 or rows == 1 else _ENDS_OF_ROWS
    exact = ', input_precision="ieee"' if dtype == torch.float32 else ""
    loaded = 'tl.load(mask + rows[:, None] * m2 + places[None, :] * m3, inside, float("-inf")).to(tl.float32)'
    facts = {"rows": rows, "f": f, "kind": _TRITON[dtype], "size": rows * f}
    text = _PARTS.format(
        strides=", ".join(f"{name}{n}" for name in "qkvmo" for n in range(4)),
        padded=16 if rows <= 16 else 1 << (rows - 1).bit_length(),
        e=e,
        ep=_power(e),
        fp=_power(f),
        block=block,
        mask='tl.where(inside, 0.0, float("-inf"))' if mask is None else loaded,
        exact=exact,
        ends="" if early or mask is None else ends.format(block=block, rows=rows, many=MANY).strip("\n"),
        scale=repr(scale),
        end=(_RESULT if splits == 1 else _PART).format(**facts).strip("\n"),
        **facts,
    )
    types = [dtype] * 3 + [mask or dtype, dtype if splits == 1 else torch.float32]
    kinds = ["i32"] * 3 + ["i64:16" if n % 16 == 0 else "i64" for n in strides]
    return _function("dm_attend", text, (*[POINTER[t] for t in types], *kinds), warps, stages)


def joined(dtype: torch.dtype, rows: int, width: int) -> TritonFunction:
    """Of the parts and the result; its numbers: heads, splits, then the result's strides."""
    text = _JOINED.format(
        strides="o0, o1, o2, o3", rows=rows, f=width, fp=_power(width), most=MOST_SPLITS, kind=_TRITON[dtype]
    )
    return _function("dm_join", text, ("*fp32", POINTER[dtype], "i32", "i32", *["i64"] * 4))


def _function(
    name: str, text: str, signature: tuple[str, ...], warps: int = WARPS, stages: int = 0
) -> TritonFunction:
    own = f"{name}_{digest(text, repr((signature, warps, stages)))[:12]}"
    source = text.replace(f"def {name}(", f"def {own}(")
    return TritonFunction(own, source, signature, 1, warps, stages=stages)


def _power(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())
