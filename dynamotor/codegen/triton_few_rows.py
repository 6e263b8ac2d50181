"""Products of few rows as templates: outputs are the rows of a tile, so that few rows of x fill what tensor
cores want, and each part of the sums is one of a batch.

    acc = tl.dot(tl.load(weights), tl.load(x, rows), acc)       # [64 outputs, 16 rows]

`lower/few_rows.py` says which products come in parts, and how they are cut.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..lower import few_rows as rule
from ..lower.ir import loads_of
from ..lower.program import BufRef, ExternStep, Program, Step
from .triton_gemm import Tiling
from .triton_plan import power_of_two
from .triton_product import Operand, Product


def few_rows(program: Program, step: Step) -> Product | None:
    """The product that a call computes in parts; None for another call."""
    if not isinstance(step, ExternStep) or step.target is not torch.ops.dynamotor.few_rows_product.default:
        return None
    x, weights, parts = step.args
    if step.outs[0] is None:
        return None
    out = BufRef.whole(program.buffers[step.outs[0]])
    rows, inner, outputs = int(x.shape[1]), int(x.shape[2]) // parts, int(weights[0].shape[1])
    a = [
        _operand(w, (w.stride[0] * inner, w.stride[1], w.stride[0]), (parts, outputs, inner)) for w in weights
    ]
    b = _operand(x, (x.stride[2] * inner, x.stride[2], x.stride[1]), (parts, inner, rows))
    others = [replace(b, offset=b.offset + n * int(x.stride[0])) for n in range(1, len(a))]
    to = _operand(out, (rows * outputs, 1, outputs), (parts, outputs, rows))
    return Product(
        (parts, outputs, rows, inner), a[0], b, None, to, x.dtype, more=tuple(zip(a[1:], others, strict=True))
    )


def _operand(ref: BufRef, stride: tuple[int, ...], size: tuple[int, int, int]) -> Operand:
    batch, row, column = (int(step) if n > 1 else 0 for n, step in zip(size, stride, strict=True))
    return Operand(ref.name, ref.dtype, int(ref.offset), (batch, row, column))


def tiling_of(product: Product) -> Tiling:
    """The tiling that the cut of a product stands for."""
    parts, outputs, rows, inner = product.size
    stored = [e.args[2].itemsize for expr in product.computed for e in loads_of(expr)]
    itemsize = min(stored, default=product.a.dtype.itemsize)
    cut = rule.cut_of(rows, itemsize, len(product.pairs), outputs, parts * inner)
    columns = max(power_of_two(rows), 16)
    return Tiling(cut.outputs, columns, cut.inner, warps=cut.warps, stages=cut.stages)
