"""A softmax over scores and one column more ("attention sinks"), of whose result that column is cut off
again: on a GPU the scores are not copied beside the column.

    p = softmax(c - c.max(-1, keepdim=True).values, -1)[..., :-1]     c = cat([a, b], -1)
    p = exp(a - m) / (sum(exp(a - m)) + exp(b - m))                   m: the largest of a and b

The maximum has no gradient: its share is zero, for a softmax does not change when all its numbers move.

>>> without_extra_columns(gm)  # a copy of the graph, or the graph itself
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..base.config import config
from ..base.events import counters
from ..graph.eager_attention import extra_column
from ..graph.module import rewritten
from ..graph.spec import TensorSpec
from .calls import no_autocast

Node = torch.fx.Node


def without_extra_columns(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with such softmaxes in the second form: a copy, since callers keep the original."""
    return gm if config.exact else rewritten(gm, _columns, _rewrite)


def softmax_beside(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The softmax of the last dimension of `cat([a, b], -1)`, without b's column."""
    with no_autocast():
        return _Beside.apply(a.to(dtype), b.to(dtype))


class _Beside(torch.autograd.Function):
    """The backward computes the result again of the logarithm of its sums, so that one number a row is
    kept.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        top = torch.maximum(a.amax(-1, True), b)
        e = (a - top).exp()
        total = e.sum(-1, True) + (b - top).exp()
        ctx.save_for_backward(a, b, top + total.log())
        return e / total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b, high = ctx.saved_tensors
        p = (a - high).exp()
        mean = (grad * p).sum(-1, True)
        return (grad - mean) * p, -mean * (b - high).exp()


def _columns(node: Node) -> list[Node] | None:
    """The nodes from the softmax's concatenation to the softmax, if `node` cuts the last column off."""
    path = extra_column(node)
    return path if path is not None and _fits(path[-1].meta["val"]) else None


def _fits(weights: TensorSpec) -> bool:
    """Whether the kernels are a GPU's, and numbers are not rounded on the way."""
    on_gpu = weights.device.type == "cuda" or config.target == "triton"
    return on_gpu and weights.dtype in (torch.float32, torch.float64)


def _rewrite(node: Node, path: list[Node]) -> None:
    cat, softmax = path[0], path[-1]
    graph = node.graph
    parts: Any = cat.args[0]
    with graph.inserting_before(cat):
        made = graph.call_function(softmax_beside, (*parts, softmax.meta["val"].dtype))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    for part in (node, *reversed(path)):
        for unread in [user for user in part.users if not user.users]:
            graph.erase_node(unread)
        graph.erase_node(part)
    counters["softmax"]["without its extra column"] += 1
