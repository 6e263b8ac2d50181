"""Runs `dynamotor::masked_attention` on a GPU, by the kernels of `flex_attention`.

>>> out, sums = forward(q, k, v, [], blocks, "q-k>=0", 0.125, q.stride())
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from ..graph.mask_blocks import BLOCK
from ..graph.mask_text import PLACES, evaluated
from ..graph.sizes import Dim
from ..graph.spec import CPU, TensorSpec, aten
from ..graph.subgraphs import Body, Leaf
from . import flex_attention
from .flex_attention import Kernels
from .flex_body import TileFunction
from .flex_kernels import Blocks, Case

Tensors = Sequence[torch.Tensor]
_lengths: dict[Hashable, set[tuple[Dim, Dim]]] = {}  # of queries and keys, by kind of call


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    reads: Tensors,
    blocks: Tensors,
    mask: str,
    scale: float,
    stride: Sequence[int],
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.ops.dynamotor.masked_attention`."""
    own = () if sinks is None else (sinks,)
    given = query, key, value, *reads, *blocks, *own
    run = _kernels(("forward",), mask, scale, tuple(stride), len(reads), *_specs(*given))
    shape = (*query.shape[:3], value.shape[3])
    out = torch.empty_strided(shape, tuple(stride), dtype=query.dtype, device=query.device)
    sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    by_row = blocks[: len(blocks) // 2]
    run(run.forward_for(by_row), query, key, value, out, sums, *own, *by_row, *reads)
    return out, sums


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    reads: Tensors,
    blocks: Tensors,
    mask: str,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `torch.ops.dynamotor.masked_attention_backward`."""
    given = query, key, value, *reads, *blocks
    run = _kernels(("delta", "queries", "keys"), mask, scale, out.stride(), len(reads), *_specs(*given))
    given = (query, key, value, grad, out, sums)
    half = len(blocks) // 2
    return flex_attention.backward(run, given, torch.zeros_like(sums), blocks[:half], blocks[half:], reads)


def _specs(*tensors: torch.Tensor) -> list[TensorSpec]:
    return [TensorSpec(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


@functools.lru_cache(maxsize=64)
def _kernels(
    which: tuple[str, ...], mask: str, scale: float, stride: tuple[int, ...], n_reads: int, *specs: TensorSpec
) -> Kernels:
    """The kernels of tensors with these sizes and strides: q, k, v, reads, blocks and perhaps sinks."""
    query, key, value, *rest = specs
    reads, rest = rest[:n_reads], rest[n_reads:]
    sides = [rest[:5], rest[5:10]] if reads else [rest[:4], rest[4:8]]
    seen = lines_of_mask(mask, reads, (*query.shape[:3], key.shape[2]))
    out = TensorSpec((*query.shape[:3], value.shape[3]), stride, query.dtype, query.device)
    rows, columns = ((Blocks(*side[:2]), Blocks(*side[2:4])) for side in sides)
    orders = (sides[0][4], sides[1][4]) if reads else None
    sinks = rest[-1] if len(rest) % 2 else None
    lengths = _lengths.setdefault((which, mask, scale, query.dtype, query.shape[3], value.shape[3]), set())
    lengths.add((query.shape[2], key.shape[2]))
    general = len(lengths) > flex_attention.OWN
    given = query, key, value, scale, None, seen
    case = Case(*given, tuple(reads), 0, (BLOCK, BLOCK), rows, columns, out, sinks, general, orders)
    return Kernels(case, which)


def lines_of_mask(mask: str, reads: Sequence[TensorSpec], sizes: Sequence[Dim]) -> TileFunction:
    """What writes the mask of a tile. sizes: batches, heads, queries and keys. Raises Decline."""
    numbers = [TensorSpec.dense((), torch.int64, reads[0].device if reads else CPU)] * 4
    return TileFunction(_body(mask, len(reads)), [*numbers, *reads], [int(n) for n in sizes], False)


def _body(mask: str, n_reads: int) -> Body:
    """The formula as a function of four numbers and the tensors that it reads."""
    graph = fx.Graph()
    names = [*PLACES, *[f"r{i}" for i in range(n_reads)]]
    given: dict[str, Any] = {name: fx.Proxy(graph.placeholder(name)) for name in names}

    def index(tensor: fx.Proxy, at: tuple[Any, ...]) -> fx.Proxy:  # `tensor[at]` would read the numbers
        places: list[Any] = [given["b"] * 0 + i if isinstance(i, int) else i for i in at]
        return fx.Proxy(graph.call_function(aten.index.Tensor, (tensor.node, [i.node for i in places])))

    graph.output((evaluated(mask, given, index).node,))
    return Body(fx.GraphModule({}, graph), n_reads, Leaf(0))


_library = torch.library.Library("dynamotor", "FRAGMENT")
_library.impl("masked_attention", forward, "CUDA")
_library.impl("masked_attention_backward", backward, "CUDA")
