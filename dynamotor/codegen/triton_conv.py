"""Convolutions of channels-last images as matrix products: rows are places of the result, k goes through what
is under them.

    for step in tl.range(0, 9 * 1):                  # kernel positions × blocks of channels
        a = tl.load(p0 + (a_row + ...)[:, None] + c[None, :], inside, 0.0)      # zeros where the padding is
        acc = tl.dot(a, tl.load(b_at + ...), acc)

One of 1×1 without stride and padding is a plain product. The rest (bias, epilogue, stores) is that of
`triton_gemm.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..lower.channels_last import is_channels_last
from ..lower.program import BufRef, ExternStep, Program, Step
from .triton_ops import lines_of
from .triton_product import ConvWindow, Operand, Product, masked
from .triton_tma import Plane

LEAST_CHANNELS = 16  # fewer leave most of a tile over k empty
_DTYPES = (torch.bfloat16, torch.float16)
Pair = tuple[int, int]


def convolution(program: Program, step: Step) -> Product | None:
    """The product that a convolution is; None where a template cannot compute it."""
    if (
        not isinstance(step, ExternStep)
        or step.target is not torch.ops.aten.convolution.default
        or step.outs[0] is None
    ):
        return None
    x, weight, bias, stride, padding, dilation, transposed, _, groups = step.args
    out = BufRef.whole(program.buffers[step.outs[0]])
    if len(x.shape) != 4 or transposed or groups != 1 or 0 in (*x.shape, *weight.shape, *out.shape):
        return None
    operands = [x, weight, out, *([bias] if bias is not None else [])]
    dtypes = {r.dtype for r in operands} | {program.buffers[r.name].spec.dtype for r in operands}
    names = [r.name for r in operands]
    if (
        len(dtypes) != 1
        or not dtypes <= set(_DTYPES)
        or names.count(out.name) > 1
        or x.shape[1] < LEAST_CHANNELS
    ):
        return None
    if not is_channels_last(weight) or not is_channels_last(out) or x.stride[1] != 1 or 0 in _steps(x):
        return None
    return _product(x, weight, bias, out, _pair(stride), _pair(padding), _pair(dilation))


def _product(
    x: BufRef, weight: BufRef, bias: BufRef | None, out: BufRef, stride: Pair, padding: Pair, dilation: Pair
) -> Product:
    images, channels, n = int(x.shape[0]), int(x.shape[1]), int(weight.shape[0])
    image, kernel, result = (_pair(ref.shape[2:]) for ref in (x, weight, out))
    m, k = images * result[0] * result[1], channels * kernel[0] * kernel[1]
    window = ConvWindow(channels, image, result, kernel, stride, padding, dilation, _steps(x))
    row = _row(x)
    plain = k == channels and stride == (1, 1) and padding == (0, 0) and row is not None
    a = Operand(x.name, x.dtype, int(x.offset), (0, _step(m, row or 0), 1))
    b = Operand(weight.name, x.dtype, int(weight.offset), (0, 1, _step(n, k)))
    added = (
        Operand(bias.name, x.dtype, int(bias.offset), (0, 0, _step(n, int(bias.stride[0]))))
        if bias is not None
        else None
    )
    to = Operand(out.name, x.dtype, 0, (0, _step(m, n), _step(n, 1)))
    return Product((1, m, n, k), a, b, added, to, x.dtype, window=None if plain else window)


def _step(size: int, stride: int) -> int:
    return stride if size > 1 else 0


def _row(x: BufRef) -> int | None:
    """Elements from one place of the images to the next, where all places of all images are one run."""
    images, _, rows, columns = x.shape
    places = [(columns, 1, x.stride[3]), (rows, columns, x.stride[2]), (images, rows * columns, x.stride[0])]
    steps = {step / count for size, count, step in places if size > 1}
    return int(steps.pop()) if len(steps) == 1 else 0 if not steps else None


def _pair(given: Any) -> Pair:
    """A setting for both dimensions."""
    values = tuple(given)
    return values if len(values) == 2 else values * 2


def _steps(x: BufRef) -> tuple[int, int, int]:
    """Elements from one image, row and column to the next; 0 where one is repeated."""
    down, _, row, column = (int(step) or int(size == 1) for size, step in zip(x.shape, x.stride, strict=True))
    return down, row, column


def multiply_window(
    p: Product,
    tile: tuple[int, int, int],
    pointers: Mapping[str, str],
    wide: bool,
    weights: Plane | None = None,
) -> Iterator[str]:
    """The loop over kernel positions and blocks of channels, for a tile of the result. weights: read through
    a descriptor.
    """
    assert p.window is not None
    tile_m, tile_n, tile_k = tile
    w, (_, m, n, k), big = p.window, p.size, ".to(tl.int64)" if wide else ""
    blocks = -(-w.channels // tile_k)
    place, c = (f"step // {blocks}", f"step % {blocks} * {tile_k} + ak") if blocks > 1 else ("step", "ak")
    yield from lines_of(f"""
        am = (tm * {tile_m} + tl.arange(0, {tile_m})){big}
        bn = (tn * {tile_n} + tl.arange(0, {tile_n})){big}
        ak = tl.arange(0, {tile_k}){big}
        top = (am // {w.result[1]}) % {w.result[0]} * {w.stride[0]} - {w.padding[0]}
        left = am % {w.result[1]} * {w.stride[1]} - {w.padding[1]}
        a_row = am // {w.result[0] * w.result[1]} * {w.step[0]} + top * {w.step[1]} + left * {w.step[2]}
        acc = tl.zeros([{tile_m}, {tile_n}], tl.float32)
        steps = depth // {w.channels} * {blocks}
        tl.assume(steps > 0)
        for step in tl.range(0, steps):
            place = {place}
            c = {c}
            down = place // {w.kernel[1]} * {w.dilation[0]}
            right = place % {w.kernel[1]} * {w.dilation[1]}
    """)
    channel = f"c{{}} < {w.channels}" if w.channels % tile_k else ""
    rows = [f"am < {m}"] if m % tile_m else []
    for start, by, size, padded in zip(("top", "left"), ("down", "right"), w.image, w.padding, strict=True):
        rows += [f"{start} + {by} >= 0", f"{start} + {by} < {size}"] if padded else []
    if rows:
        yield f"    inside = {' & '.join(f'({r})' for r in rows)}"
    a_mask = masked("inside[:, None]" if rows else "", channel.format("[None, :]"))
    yield (
        f"    a_at = {p.a.start(pointers)} + "
        f"(a_row + (down * {w.step[1]} + right * {w.step[2]}))[:, None] + c[None, :]"
    )
    if weights is None:
        b_mask = masked(channel.format("[:, None]"), f"bn[None, :] < {n}" if n % tile_n else "")
        yield f"    b_at = {p.b.start(pointers)} + (place * {w.channels} + c)[:, None] + (bn * {k})[None, :]"
        b = f"tl.load(b_at{b_mask}){p.b.cast(p.compute)}"
    else:
        b = weights.load("b_all", f"place * {w.channels} + step % {blocks} * {tile_k}", f"tn * {tile_n}")
    yield f"    acc = tl.dot(tl.load(a_at{a_mask}){p.a.cast(p.compute)}, {b}, acc)"
