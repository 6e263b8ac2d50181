"""The cross-entropy of a final linear layer, some rows at a time: the logits of a language model are never in
memory as a whole, nor are their gradients.

The forward computes the loss and the gradients of the layer's input and weight chunk by chunk; the backward
only scales them. Where a graph gives its logits away, or wants second derivatives, nothing changes.

>>> with_chunked_losses(gm, graded)  # a copy of the graph, or the graph itself
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..base.config import config
from ..base.events import counters
from ..base.narrowing import checked
from ..graph.module import rewritten
from ..graph.sizes import hint
from ..graph.spec import TensorSpec, aten
from .calls import no_autocast

Node = torch.fx.Node
F = torch.nn.functional
_SUM = 2  # aten's number of the reduction
_DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float64,
)  # scaled losses keep halves from underflowing in float16
_TILE = 128  # rows of a kernel's tiles
_CHUNKS = 4  # of the size from which a loss is computed in chunks


def with_chunked_losses(gm: torch.fx.GraphModule, graded: Sequence[bool]) -> torch.fx.GraphModule:
    """The graph with its losses in chunks: a copy, since the original is differentiated twice."""
    if not any(graded) or not torch.is_grad_enabled() or not config.chunk_logits_from:
        return gm
    inputs = gm.graph.find_nodes(op="placeholder")
    frozen = frozenset(node.name for node, wanted in zip(inputs, graded, strict=True) if not wanted)
    return rewritten(gm, functools.partial(_loss, frozen), _rewrite)


@dataclass(frozen=True)
class _Loss:
    """A loss of logits: the layer's input, weight and bias, the views from it to the loss, the labels."""

    layer: tuple[Any, Any, Any]
    views: list[Node]
    labels: Node
    target: ChunkedLoss


@dataclass(frozen=True)
class ChunkedLoss:
    """A node's target: the loss of (rows, weight, bias, labels).

    dtype: of the loss; product: of the logits.
    """

    mean: bool
    ignored: int
    chunk: int
    dtype: torch.dtype
    product: torch.dtype
    __name__ = __qualname__ = "chunked_loss"

    def __call__(self, rows: Any, weight: Any, bias: Any, labels: Any) -> torch.Tensor:
        with no_autocast():
            return _Chunked.apply(self, rows, weight, bias, labels)


# Which losses -----------------------------------------------------------------------------------------------
_NAMES = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


def _loss(frozen: frozenset[str], node: Node) -> _Loss | None:
    """The loss of a linear layer that a node computes, where the logits are many and nothing else reads
    them.
    """
    if node.op != "call_function" or node.target is not F.cross_entropy:
        return None
    given: dict[str, Any] = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
    usual = all(given.get(name) is None for name in ("weight", "size_average", "reduce"))
    reduction, ignored = given.get("reduction", "mean"), given.get("ignore_index", -100)
    logits, labels = _spec(given["input"]), _spec(given["target"])
    usual &= (
        given.get("label_smoothing", 0.0) == 0.0 and reduction in ("mean", "sum") and type(ignored) is int
    )
    if not usual or logits is None or labels is None or labels.dtype is not torch.int64:
        return None
    rows, *rest = logits.shape
    if len(rest) != 1 or len(labels.shape) != 1 or type(rows) is not int or type(rest[0]) is not int:
        return None
    dtype = node.meta["val"].dtype
    limit = config.chunk_logits_from * 2**20
    size = rows * rest[0] * dtype.itemsize
    layer, views = _layer_above(given["input"], rest[0])
    if layer is None or size < limit or _chunk(limit, rest[0], dtype) >= rows or dtype not in _DTYPES:
        return None
    product = views[0].meta["val"].dtype
    if product not in _DTYPES:
        return None
    chunk = _chunk(limit, rest[0], dtype)
    if layer[1].name not in frozen:
        chunk = max(chunk, _chunk_beside_gradients(rows, layer[1]))
    target = ChunkedLoss(reduction == "mean", ignored, chunk, dtype, product)
    names: Any = given["target"]
    return _Loss(layer, views[1:], names, target)


def _chunk(limit: float, width: int, dtype: torch.dtype) -> int:
    return max(int(limit / _CHUNKS / (width * dtype.itemsize)), 1)


def _chunk_beside_gradients(rows: int, weight: Node) -> int:
    """Rows of a chunk where the weight's gradient is wanted, of which each chunk makes a part as large as the
    weight. All parts are there when they are summed; those before the last chunk are beside its logits, which
    take four times their bytes while their gradients are made. The sum is least for as many chunks as the
    root of 4 rows / width.
    """
    width = checked(TensorSpec, _spec(weight)).shape[1]
    count = max(round(math.sqrt(4 * rows / hint(width))), 2)
    chunk = -(-rows // count)
    return chunk if chunk < _TILE else -(-chunk // _TILE) * _TILE


def _spec(value: Any) -> TensorSpec | None:
    found = value.meta.get("val") if isinstance(value, Node) else None
    return found if type(found) is TensorSpec else None


def _layer_above(node: Any, width: int) -> tuple[Any, list[Node]]:
    """The linear layer from which logits come by views of rows and conversions, and the nodes from it on."""
    path: list[Node] = []
    while isinstance(node, Node) and len(node.users) == 1 and node.op.startswith("call"):
        path.append(node)
        layer = _operands(node)
        if layer is not None:
            return layer, path[::-1]
        if not _keeps_columns(node, width):
            break
        node = node.args[0]
    return None, path


def _operands(node: Node) -> tuple[Any, Any, Any] | None:
    """The input, weight and bias of a node that is a linear layer."""
    if node.target is F.linear:
        rows, weight, bias = [(*node.args, None)[i] for i in range(2)] + [_bias(node)]
    elif node.target in (torch.matmul, operator.matmul) and _is_transposed(node.args[1]):
        rows, weight, bias = node.args[0], checked(Node, node.args[1]).args[0], None
    else:
        return None
    spec, of_weight = _spec(rows), _spec(weight)
    fits = spec is not None and of_weight is not None and len(of_weight.shape) == 2 and len(spec.shape) > 1
    return (rows, weight, bias) if fits else None


def _bias(node: Node) -> Any:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def _is_transposed(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_method" and node.target == "t"


def _keeps_columns(node: Node, width: int) -> bool:
    """Whether a node is a view of rows, or a conversion to another float type; each row stays whole."""
    spec = _spec(node)
    if spec is None or not spec.dtype.is_floating_point or spec.shape[-1] != width:
        return False
    if node.op == "call_method":
        source = _spec(node.args[0])
        if node.target in ("view", "reshape", "flatten"):
            return source is not None and source.shape[-1] == width
        return node.target in ("float", "to", "contiguous")
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    items, source = node.args[1], _spec(node.args[0])
    slices = all(item is Ellipsis or isinstance(item, slice) for item in items)
    reaches = Ellipsis in items or source is not None and len(items) == len(source.shape)
    return slices and (items[-1] in (Ellipsis, slice(None)) or not reaches)


def _rewrite(node: Node, loss: _Loss) -> None:
    """Views of the logits become views of the layer's input; then the loss takes both."""
    rows, weight, bias = loss.layer
    graph = node.graph
    with graph.inserting_before(node):
        for view in loss.views:
            if view.target is operator.getitem:
                rows = graph.call_function(operator.getitem, (rows, view.args[1]))
        flat = graph.call_method("flatten", (rows, 0, -2))
        made = graph.call_function(loss.target, (flat, weight, bias, loss.labels))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    for view in reversed(loss.views):
        graph.erase_node(view)
    counters["losses"]["in chunks"] += 1


# The loss ---------------------------------------------------------------------------------------------------
class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, of: ChunkedLoss, rows: torch.Tensor, weight: torch.Tensor, bias: Any, labels: torch.Tensor
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad[1:4]
        half, plain = weight.to(of.product), None if bias is None else bias.to(of.product)
        total = torch.zeros((), dtype=of.dtype, device=rows.device)
        share = torch.ones((), dtype=of.dtype, device=rows.device)
        if of.mean:
            share = share / (labels != of.ignored).sum()
        of_rows: list[torch.Tensor] = []
        of_weight = torch.zeros(weight.shape, dtype=of.dtype, device=rows.device) if wanted[1] else None
        of_bias = torch.zeros(bias.shape, dtype=of.dtype, device=rows.device) if wanted[2] else None
        for part, names in zip(rows.split(of.chunk), labels.split(of.chunk), strict=True):
            part = part.to(of.product)
            likely = F.linear(part, half, plain).to(of.dtype).log_softmax(-1)
            lost, count = aten.nll_loss_forward(likely, names, None, _SUM, of.ignored)
            total = total + lost
            grad = aten.nll_loss_backward(share, likely, names, None, _SUM, of.ignored, count)
            grad = aten._log_softmax_backward_data(grad, likely, -1, of.dtype)
            if of_bias is not None:
                of_bias = of_bias + grad.sum(0)
            grad = grad.to(of.product)
            if wanted[0]:
                of_rows.append(grad @ half)
            if of_weight is not None:
                of_weight = of_weight + (grad.t() @ part).to(of.dtype)
        found = [torch.cat(of_rows).to(rows.dtype) if of_rows else None]
        found += [
            None if t is None else t.to(like.dtype) for t, like in ((of_weight, weight), (of_bias, bias))
        ]
        ctx.save_for_backward(*[t for t in found if t is not None])
        ctx.places = [i for i, t in enumerate(found) if t is not None]
        return total * share if of.mean else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        found: list[Any] = [None] * 5
        for place, saved in zip(ctx.places, ctx.saved_tensors, strict=True):
            found[1 + place] = (saved * grad).to(saved.dtype)
        return tuple(found)
