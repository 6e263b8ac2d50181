"""Weights of a product that are computed on their tile: a kernel that would write them becomes the product's
prologue, so that they are read as they are stored (bytes, scales) and never written.

    for k in tl.range(0, depth, 128):
        r = k + tl.arange(0, 128)[None, :]
        v1 = tl.load(p0 + (x * 2048 + r)).to(tl.int32)          # the kernel's statements over (m, k)
        acc = tl.dot(v1.to(tl.float32).to(tl.bfloat16), tl.load(b_at), acc)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..lower.few_rows import STEP
from ..lower.index_expr import Index, flatten
from ..lower.ir import Expr, Kernel, Store, walk
from .triton_body import Axis, Name, TileBody, TileScope
from .triton_ops import MEMORY
from .triton_product import Operand, Product, digits


def computed(product: Product, kernels: Sequence[Kernel]) -> Product | None:
    """The product with these kernels as the prologue that makes its weights; None where one does something
    else.
    """
    stores = [s for kernel in kernels for s in kernel.statements()]
    by_buffer = {s.buffer: s for s in stores if isinstance(s, Store) and not s.scatters and not s.part}
    weights = [a for a, _ in product.pairs]
    if product.size[3] % STEP:
        return None
    if len(by_buffer) != len(stores) or by_buffer.keys() != {a.buffer for a in weights}:
        return None
    found = [_element(product, a, by_buffer[a.buffer]) for a in weights]
    exprs = [e for e in found if e is not None]
    given = {name: dtype for kernel in kernels for name, dtype, written in kernel.params if not written}
    if len(exprs) < len(found) or given.keys() & (product.buffers().keys() | {product.out.buffer}):
        return None
    params = (*product.params, *((name, dtype, False) for name, dtype in given.items()))
    return replace(product, computed=tuple(exprs), params=params)


def _element(product: Product, weights: Operand, s: Store) -> Expr | None:
    """The element (z, m, k) of weights, from the store that would write them."""
    loops = [v for v in s.index.vars() if v.size > 1]
    batch, m, _, k = product.size
    steps = {v: step for v in loops if type(step := s.index.coefficient(v)) is int}
    if len(steps) < len(loops) or s.index.const or not s.index.is_affine or s.memory != weights.dtype:
        return None
    if s.expr.vars - set(loops) or not digits(steps, batch * m * k):
        return None
    z, row, _ = product.loops
    at = flatten([Index.of(v) for v in (z, row, product.inner)], weights.stride, weights.offset)
    return s.expr.subst({v: (at // step) % v.size for v, step in steps.items()})


def multiply_computed(
    p: Product, tile: tuple[int, int, int], pointers: Mapping[str, str], wide: bool
) -> Iterator[str]:
    """The loop over k, for a tile of the result."""
    tile_m, tile_n, tile_k = tile
    (z, m, _), (_, b) = p.loops, p.pairs[0]
    big, batched = ".to(tl.int64)" if wide else "", p.size[0] > 1
    axes = Axis.of("x", (m,), tile_m), Axis.of("r", (p.inner,), tile_k)
    body = TileBody(pointers, p.streams, axes, list(walk(*p.computed)), wide)
    top = TileScope(indent=0)
    rows, masks = body.bind(axes[0], f"tm * {tile_m}", top)
    before = TileScope(top, {**rows, z: Name("z" if batched else "0", frozenset())}, masks=masks, indent=0)
    step = TileScope(before, indent=1)
    columns, _ = body.bind(axes[1], "k", step)
    step.own.update(columns)
    step.bound.update(columns)
    start = f"{b.start(pointers)}{f' + z * {b.stride[0]}' if batched else ''}"
    inside = f", (bn[None, :] < {p.size[2]}), 0.0" if p.size[2] % tile_n else ""
    for weight, (_, other) in zip(p.computed, p.pairs, strict=True):
        value = body.full_tile(body.value(weight, step))
        place = f"b_at + {other.offset - b.offset}" if other.offset != b.offset else "b_at"
        step.line(f"acc = tl.dot({value}.to({MEMORY[p.compute]}), tl.load({place}{inside}), acc)")
    yield f"bn = (tn * {tile_n} + tl.arange(0, {tile_n})){big}"
    yield f"ak = tl.arange(0, {tile_k}){big}"
    yield f"b_at = {start} + (ak[:, None] * {b.stride[1]} + bn[None, :] * {b.stride[2]})"
    yield f"acc = tl.zeros([{tile_m}, {tile_n}], tl.float32)"
    yield from (*top.lines, *before.lines)
    yield f"for k in tl.range(0, depth, {tile_k}):"
    yield from step.lines
    yield f"    b_at += {tile_k * b.stride[1]}"
