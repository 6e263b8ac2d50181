"""Products of few rows on a GPU, where reading the weights takes the time: parts of a product, side by side,
that a template computes (`codegen/triton_few_rows.py`), and their sum where the result is read.

    mm(x, t(w))  →  p = few_rows_product(x[None], [t(w)], 4);  p[0] + p[1] + p[2] + p[3]

A library's product of few rows leaves multiprocessors without work, and weights in bytes it would want
converted, in memory. Parts are added in order, so results do not change from run to run. Where tiles of wide
weights fill the GPU there is one part, and the kernel behind the product, or behind both products of a gate,
becomes its epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import fx

from ..graph.nodes import arguments, find_spec, spec_of, take_place
from ..graph.shapes import call
from ..graph.spec import HALVES, GraphInfo, TensorSpec, aten, numel
from .realize import IN_MEMORY
from .row_products import Apart, apart, base_of, columns_of, is_narrow, lies_by_rows, numbers_of

FEWEST, MOST = 2, 64  # rows; one row is a sum (`row_products.py`)
FEWEST_NARROW = 2  # of weights in bytes
# Weights in halves: beyond these sizes cuBLAS reads more of them a second (8 rows of 2,048 by 8,192 on an
# H200 2.8 TB/s, parts 2.0; 2,048 by 2,048 1.3 and 1.45). Those beyond the first take WIDE tiles.
FEW_HALVES, MOST_HALVES, MOST_ROWS_OF_HALVES = 1 << 22, 1 << 25, 32
LEAST = 1 << 19  # weights; below, a launch more costs as much as it saves
MOST_PARTS = 8  # a kernel that adds them up reads no more values
VECTOR = 8  # halves in 16 bytes
STEP = 32  # inner places of computed weights come in whole steps of tensor cores


@dataclass(frozen=True, slots=True)
class FewRowsCut:
    """How a product is cut: weights of a tile (outputs by inner places), warps and depth of its pipeline, and
    how many programs a GPU should have. least: inner places of a part.
    """

    outputs: int = 64
    inner: int = 128
    warps: int = 4
    stages: int = 4
    programs: int = 264
    least: int = 256

    def parts(self, outputs: int, inner: int) -> int:
        """Into how many parts the sums over so many places are cut."""
        tiles, parts = -(-outputs // self.outputs), 1
        while parts < MOST_PARTS and tiles * parts < self.programs:
            if inner % (parts * 2 * STEP) or inner // (parts * 2) < self.least:
                break
            parts *= 2
        return parts


# A program for each multiprocessor, with 80 kB of a gate's weights on the way to it.
WIDE = FewRowsCut(inner=64, programs=128, stages=6)


def cut_of(rows: int, itemsize: int = 2, numbers: int = 1, outputs: int = 0, inner: int = 0) -> FewRowsCut:
    """How a product of so many rows is cut. itemsize, numbers: bytes of a stored weight, and how many weights
    are in one. outputs, inner: of the weights.
    """
    if itemsize > 1 and outputs * inner > FEW_HALVES:
        return WIDE
    inner = 256 // itemsize >> (numbers - 1).bit_length()
    stages = 3 if rows > 32 else 4
    if itemsize > 1:  # small tiles: five programs share a multiprocessor, all of their loads in flight
        return FewRowsCut(inner=inner // 2, stages=stages)
    outputs, warps = (32, 2) if rows <= 16 else (64, 4)
    return FewRowsCut(outputs, inner, warps, stages, least=256 // numbers)


def part_products_of_few_rows(gm: fx.GraphModule, info: GraphInfo) -> None:
    """mm and addmm of few rows of half precision → sums of parts."""
    known: Apart = {}
    for node in [n for n in gm.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]:
        *bias, x, w = arguments(node)
        narrow = is_narrow(w, node) and int(spec_of(w).shape[0]) % (numbers_of(w) * STEP) == 0
        fewest = FEWEST_NARROW if narrow else FEWEST
        if node.kwargs or not _is_few(spec_of(node), x, w, fewest):
            continue
        if narrow or _are_few_halves(node, w):
            base_of(x).meta[IN_MEMORY] = True
            with gm.graph.inserting_before(node):
                columns = columns_of(gm.graph, w) if narrow else [w]
                rows = apart(gm.graph, x, len(columns), known)
                inner, outputs = map(int, spec_of(w).shape)
                cut = cut_of(int(spec_of(x).shape[0]), 1 if narrow else 2, len(columns), outputs, inner)
                take_place(_sum_of_parts(gm.graph, rows, columns, bias, spec_of(node).dtype, cut), node)


def _is_few(spec: TensorSpec, x: fx.Node, w: fx.Node, fewest: int) -> bool:
    """Whether a product has few rows and many weights, all of one type."""
    if spec.is_symbolic or spec.dtype not in HALVES or not fewest <= spec.shape[0] <= MOST:
        return False
    given = [find_spec(x), find_spec(w)]
    if any(s is None or s.is_symbolic or s.dtype != spec.dtype for s in given):
        return False
    return int(numel(spec_of(w).shape)) >= LEAST


def _are_few_halves(node: fx.Node, w: fx.Node) -> bool:
    """Whether weights in memory are few, in rows of whole vectors."""
    few = int(numel(spec_of(w).shape)) <= MOST_HALVES and int(spec_of(node).shape[0]) <= MOST_ROWS_OF_HALVES
    return few and lies_by_rows(w) and int(spec_of(w).stride[1]) % VECTOR == 0


def _sum_of_parts(
    graph: fx.Graph,
    x: fx.Node,
    columns: list[fx.Node],
    bias: list[fx.Node],
    dtype: torch.dtype,
    cut: FewRowsCut,
) -> fx.Node:
    """The product as a sum of parts, rounded once."""
    parts = cut.parts(int(spec_of(columns[0]).shape[1]), int(spec_of(x).shape[2]))
    product = call(graph, torch.ops.dynamotor.few_rows_product.default, x, columns, parts)
    terms = [call(graph, aten.select.int, product, 0, n) for n in range(parts)]
    terms += [call(graph, aten._to_copy.default, addend, dtype=torch.float32) for addend in bias]
    total = reduce(lambda a, b: call(graph, aten.add.Tensor, a, b), terms)
    return call(graph, aten._to_copy.default, total, dtype=dtype)
