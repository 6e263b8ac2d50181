"""The Triton text of `dynamotor::grouped_product`: one launch for all groups, whose ends the device reads.

    rows      y[r] = x[r] @ w[group of r]           programs of tiles of rows; a tile has rows of one group
    weights   d[g] = a[:, rows of g] @ b[rows of g]     programs of tiles of one group's matrix

The number of tiles depends on the groups, the number of programs does not: there are as many as any groups of
so many rows could need, and those without a tile return.

>>> rows_kernel(torch.float32, "tf32x3", Tile(128, 128, 32), 8, strides=(2048, 1, 8388608, 1, 2048, 4096, 1))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base.cache import digest
from .triton_kernel import TritonFunction
from .triton_ops import MEMORY, POINTER

_NEAR = 1 << 21  # a tile's positions stay below 2^31 for strides up to this


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a tile of the result (m x n) and of a step (k); warps of a program, depth of the pipeline, and
    tiles of rows that share columns, one after the other. apart: each step's product is added to the sum as
    float32 is, since the units of matrix products cut off digits of a sum instead of rounding.
    """

    m: int
    n: int
    k: int
    warps: int = 8
    stages: int = 3
    group: int = 8
    apart: bool = False


_ROWS = """
@triton.jit
def dm_grouped_rows(x, w, offs, y, groups, rows, columns, depth, x0, x1, w0, w1, w2, y0, y1):
    pid = tl.program_id(0)
    across = tl.cdiv(columns, {n})
    down = tl.num_programs(0) // across
    first = pid // ({group} * across) * {group}
    beside = tl.minimum(down - first, {group})
    tile = first + pid % ({group} * across) % beside
    column = pid % ({group} * across) // beside * {n}
    g = tl.arange(0, {padded})
    ends = tl.minimum(tl.maximum(tl.load(offs + g, g < groups, 0), 0), rows)
    ends = tl.where(g < groups, ends, rows)
    starts = tl.minimum(tl.maximum(tl.load(offs + g - 1, (g > 0) & (g <= groups), 0), 0), rows)
    starts = tl.where(g <= groups, starts, rows)
    tiles = (tl.maximum(ends - starts, 0) + {m} - 1) // {m}
    mine = tl.sum((tl.cumsum(tiles) <= tile).to(tl.int32))
    if mine > groups:
        return
    skipped = tl.sum(tl.where(g < mine, tiles, 0))
    start = tl.sum(tl.where(g == mine, starts, 0)) + (tile - skipped) * {m}
    end = tl.sum(tl.where(g == mine, ends, 0))
    steps = tl.where(mine < groups, depth, 0)
    i = tl.arange(0, {m})
    j = tl.arange(0, {n})
    e = tl.arange(0, {k})
    there = (i < end - start)[:, None]
    inside = {inside}
    x += start.to(tl.int64) * {x0} + i[:, None] * {x0} + e[None, :] * {x1}
    w += mine.to(tl.int64) * w0 + column.to(tl.int64) * {w2} + e[:, None] * {w1} + j[None, :] * {w2}
    acc = tl.full([{m}, {n}], 0.0, tl.float32)
    for at in tl.range(0, steps, {k}):
        a = tl.load(x, there{left}, 0.0)
        b = tl.load(w{right})
        acc {dot}
        x += {k} * {x1}
        w += {k} * {w1}
    y += start.to(tl.int64) * {y0} + column.to(tl.int64) * {y1} + i[:, None] * {y0} + j[None, :] * {y1}
    tl.store(y, acc.to({kind}), there & (j < columns - column)[None, :])
"""
_WEIGHTS = """
@triton.jit
def dm_grouped_weights(a, b, offs, d, groups, rows, columns, depth, a0, a1, b0, b1, d0, d1, d2):
    pid = tl.program_id(0)
    across = tl.cdiv(columns, {n})
    down = tl.cdiv(rows, {m})
    g = pid // (down * across)
    pid = pid % (down * across)
    first = pid // ({group} * across) * {group}
    beside = tl.minimum(down - first, {group})
    row = (first + pid % ({group} * across) % beside) * {m}
    column = pid % ({group} * across) // beside * {n}
    start = tl.minimum(tl.maximum(tl.load(offs + g - 1, g > 0, 0), 0), depth)
    end = tl.minimum(tl.maximum(tl.load(offs + g), 0), depth)
    i = tl.arange(0, {m})
    j = tl.arange(0, {n})
    e = tl.arange(0, {k})
    a += row.to(tl.int64) * {a0} + start.to(tl.int64) * {a1} + i[:, None] * {a0} + e[None, :] * {a1}
    b += start.to(tl.int64) * {b0} + column.to(tl.int64) * {b1} + e[:, None] * {b0} + j[None, :] * {b1}
    acc = tl.full([{m}, {n}], 0.0, tl.float32)
    for at in tl.range(start, end, {k}):
        left = tl.load(a, {above}(e < end - at)[None, :], 0.0)
        right = tl.load(b, {inside}(e < end - at)[:, None], 0.0)
        acc {dot}
        a += {k} * {a1}
        b += {k} * {b0}
    d += g.to(tl.int64) * d0 + row.to(tl.int64) * {d1} + column.to(tl.int64) * {d2}
    d += i[:, None] * {d1} + j[None, :] * {d2}
    tl.store(d, acc.to({kind}), (i < rows - row)[:, None] & (j < columns - column)[None, :])
"""


def rows_kernel(
    dtype: torch.dtype, precision: str, tile: Tile, size: tuple[int, int, int, int], strides: Sequence[int]
) -> TritonFunction:
    """Of x, w, the groups' ends and y; size: groups, rows, columns, depth. Its numbers: size and strides."""
    groups, rows, columns, depth = size
    whole = columns % tile.n == 0
    deep = depth % tile.k == 0
    masks = [*([] if whole else ["inside"]), *([] if deep else ["(e < depth - at)[:, None]"])]
    text = _ROWS.format(
        padded=_power(groups + 1),
        inside="True" if whole else "(j < columns - column)[None, :]",
        left="" if deep else " & (e < depth - at)[None, :]",
        right=f", {' & '.join(masks)}, 0.0" if masks else "",
        **_facts("a, b", dtype, precision, tile),
        **_named(("x0", "x1", "w0", "w1", "w2", "y0", "y1"), strides),
    )
    programs = (-(-rows // tile.m) + groups) * -(-columns // tile.n)
    return _function("dm_grouped_rows", text, dtype, tile, programs, [*size, *strides])


def weights_kernel(
    dtype: torch.dtype, precision: str, tile: Tile, size: tuple[int, int, int, int], strides: Sequence[int]
) -> TritonFunction:
    """Of a, b, the groups' ends and d; size: groups, rows and columns of a matrix, and rows of all groups."""
    groups, rows, columns, _ = size
    text = _WEIGHTS.format(
        above="" if rows % tile.m == 0 else "(i < rows - row)[:, None] & ",
        inside="" if columns % tile.n == 0 else "(j < columns - column)[None, :] & ",
        **_facts("left, right", dtype, precision, tile),
        **_named(("a0", "a1", "b0", "b1", "d0", "d1", "d2"), strides),
    )
    programs = groups * -(-rows // tile.m) * -(-columns // tile.n)
    return _function("dm_grouped_weights", text, dtype, tile, programs, [*size, *strides])


def _facts(operands: str, dtype: torch.dtype, precision: str, tile: Tile) -> dict[str, object]:
    exact = f', input_precision="{precision}"' if dtype == torch.float32 else ""
    # The limit keeps the compiler from handing the sum to the product, and has no other effect.
    apart = f"+= tl.dot({operands}{exact}, max_num_imprecise_acc=1)"
    return {
        "m": tile.m,
        "n": tile.n,
        "k": tile.k,
        "group": tile.group,
        "kind": MEMORY[dtype],
        "dot": apart if tile.apart else f"= tl.dot({operands}, acc{exact})",
    }


def _named(names: Sequence[str], strides: Sequence[int]) -> dict[str, str]:
    """The word of the text for each stride: a stride of 1 is a number, so that loads are wide."""
    return {name: "1" if n == 1 else name for name, n in zip(names, strides, strict=True)}


def _function(
    name: str, text: str, dtype: torch.dtype, tile: Tile, programs: int, numbers: Sequence[int]
) -> TritonFunction:
    kinds = [("i32" if n <= _NEAR else "i64") + (":16" if n % 16 == 0 else "") for n in numbers]
    signature = (POINTER[dtype], POINTER[dtype], "*i32", POINTER[dtype], *kinds)
    own = f"{name}_{digest(text, repr(signature))[:12]}"
    text = text.replace(f"def {name}(", f"def {own}(")
    return TritonFunction(own, text, signature, programs, tile.warps, stages=tile.stages)


def _power(n: int) -> int:
    return max(2, 1 << (n - 1).bit_length())
