"""A softmax over scores and one column more ("attention sinks"), of whose result that column is cut off
again: on a GPU the scores are not copied beside the column.

    p = softmax(c - c.max(-1, keepdim=True).values, -1)[..., :-1]     c = cat([a, b], -1)
    p = exp(a - m) / (sum(exp(a - m)) + exp(b - m))                   m: the largest of a and b

The maximum has no gradient: its share is zero, for a softmax does not change when all its numbers move.

>>> without_extra_columns(gm)  # a copy of the graph, or the graph itself
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..base.config import config
from ..base.events import counters
from ..graph.module import copy_of
from ..graph.spec import TensorSpec
from .calls import no_autocast

Node = torch.fx.Node
_SOFTMAX = (torch.nn.functional.softmax, torch.softmax)
_CUT = (Ellipsis, slice(None, -1, None))


def without_extra_columns(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with such softmaxes in the second form: a copy, since callers keep the original."""
    if config.exact or not any(_columns(node) for node in gm.graph.nodes):
        return gm
    copy = copy_of(gm)
    for node in list(copy.graph.nodes):
        found = _columns(node)
        if found is not None:
            _rewrite(node, found)
    copy.recompile()
    return copy


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
    if node.target is not operator.getitem or node.args[1] != _CUT or not _alone(node.args[0]):
        return None
    softmax: Any = node.args[0]
    if softmax.target not in _SOFTMAX or not _is_last(softmax, 1) or not _alone(softmax.args[0]):
        return None
    shifted: Any = softmax.args[0]
    path = [shifted, softmax]
    if shifted.target in (operator.sub, torch.sub) and len(shifted.args) == 2:
        path = [*_maximum(*shifted.args), *path]
    cat: Any = path[0]
    if cat.target is not torch.cat or not _is_last(cat, 1) or len(cat.args[0]) != 2:
        return None
    inside = {*path, *(user for part in path for user in part.users if not user.users)}
    if any(user not in inside for part in path[:-1] for user in part.users):
        return None
    scores, column = (_spec(part) for part in cat.args[0])
    if scores is None or column is None or column.shape[-1:] != (1,) or not _fits(scores, _spec(softmax)):
        return None
    return path


def _maximum(x: Any, top: Any) -> list[Node]:
    """`x`, its maximum over the last dimension and that one's first result, if `top` is it."""
    if not isinstance(top, Node) or top.target is not operator.getitem or top.args[1] != 0:
        return []
    found: Any = top.args[0]
    is_maximum = found.target in ("max", torch.max) and found.args[0] is x and _is_last(found, 1)
    return [x, found, top] if is_maximum and found.kwargs.get("keepdim") is True else []


def _is_last(node: Node, place: int) -> bool:
    """Whether the dimension that a call names is the last."""
    dim: Any = node.kwargs.get("dim", node.args[place] if len(node.args) > place else None)
    return type(dim) is int and dim == -1


def _alone(node: Any) -> bool:
    return isinstance(node, Node) and node.op.startswith("call")


def _fits(scores: TensorSpec, softmax: TensorSpec | None) -> bool:
    """Whether the kernels are a GPU's, and numbers are not rounded on the way."""
    on_gpu = scores.device.type == "cuda" or config.target == "triton"
    return on_gpu and softmax is not None and softmax.dtype in (torch.float32, torch.float64)


def _spec(node: Any) -> TensorSpec | None:
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if type(found) is TensorSpec else None


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
