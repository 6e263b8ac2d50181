"""`torch.ops.dynamotor.masked_attention`: attention whose mask is a formula, of which only blocks that show
something are computed.

>>> out, sums = torch.ops.dynamotor.masked_attention(q, k, v, [], blocks, "q-k>=0", 0.125, q.stride())

q: [batch, heads, rows, e], k: [batch, groups, length, e], v: [batch, groups, length, f], groups a divisor of
heads. reads: the tensors r0, r1, ... of the formula (`mask_text.py`). blocks: as `mask_blocks.py` gives them.
sinks: a score of each head that no value belongs to, [heads]; it counts in the sums alone.
The results are [batch, heads, rows, f] with the strides that are asked for, and the logarithms of the sums
of exponentials in float32, [batch, heads, rows]. The backward needs no sinks, for its weights are
exp(score - sum); their gradient is made of plain ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..base import compat
from .mask_blocks import shown
from .op_definition import layout, require
from .result_strides import preserved_stride
from .spec import TensorSpec, copy_as

_library = torch.library.Library("dynamotor", "FRAGMENT")
_MASK = "Tensor[] reads, Tensor[] blocks, str mask, float scale"
_library.define(
    f"masked_attention(Tensor query, Tensor key, Tensor value, {_MASK}, SymInt[] stride, Tensor? sinks=None)"
    " -> (Tensor, Tensor)"
)
_library.define(
    "masked_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, "
    f"{_MASK}) -> (Tensor, Tensor, Tensor)"
)
Tensors = Sequence[torch.Tensor]


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reads: Tensors, blocks: Tensors, mask: str,
    scale: float, stride: Sequence[int], sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The op by plain products, in float32."""
    scores = _scores(query, key, reads, mask, scale)
    sums = scores.logsumexp(-1)
    if sinks is not None:
        sums = torch.logaddexp(sums, sinks.float()[:, None])
    out = _weights(scores, sums) @ _repeated(value, query).float()
    return copy_as(out.to(query.dtype), stride), sums


def _backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    sums: torch.Tensor, reads: Tensors, blocks: Tensors, mask: str, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients by plain products, in float32; each is laid out as its operand."""
    weights = _weights(_scores(query, key, reads, mask, scale), sums)
    wide = grad.float()
    slopes = wide @ _repeated(value, query).float().mT
    slopes = weights * (slopes - (wide * out.float()).sum(-1, keepdim=True)) * scale
    return (
        torch.empty_like(query).copy_(slopes @ _repeated(key, query).float()),
        torch.empty_like(key).copy_(_summed(slopes.mT @ query.float(), key)),
        torch.empty_like(value).copy_(_summed(weights.mT @ wide, value)),
    )


def _scores(query: torch.Tensor, key: torch.Tensor, reads: Tensors, mask: str, scale: float) -> torch.Tensor:
    scores = query.float() @ _repeated(key, query).float().mT * scale
    sizes = (*query.shape[:3], key.shape[2])
    return scores.masked_fill(~shown(mask, reads, sizes, query.device), -torch.inf)


def _weights(scores: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Zero in rows that see nothing."""
    return (scores - sums.where(sums > -torch.inf, 0.0)[..., None]).exp()


def _repeated(keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)


def _summed(grad: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return grad.unflatten(1, (keys.shape[1], -1)).sum(2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, n_reads: int, given: tuple[Any, ...], sinks: torch.Tensor | None, query: torch.Tensor,
        key: torch.Tensor, value: torch.Tensor, *rest: torch.Tensor,
    ) -> Any:  # fmt: skip
        reads, blocks = rest[:n_reads], rest[n_reads:]
        out, sums = _below(query, key, value, reads, blocks, *given, sinks)
        ctx.n_reads, ctx.given = n_reads, given
        ctx.save_for_backward(sinks, query, key, value, out, sums, *rest)
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        sinks, *of, sums = ctx.saved_tensors[:6]
        rest = ctx.saved_tensors[6:]
        reads, blocks = list(rest[: ctx.n_reads]), list(rest[ctx.n_reads :])
        none = [None] * len(rest)
        if torch.is_grad_enabled():
            return None, None, *_differentiable_gradients(grad, sinks, of[:3], reads, ctx), *none
        op = torch.ops.dynamotor.masked_attention_backward
        found = op(grad, *of, sums, reads, blocks, *ctx.given[:2])
        slope = _slope(sinks, grad, of[3], sums) if ctx.needs_input_grad[2] else None
        return None, None, slope, *found, *none


def _differentiable_gradients(
    grad: torch.Tensor, sinks: torch.Tensor | None, of: Tensors, reads: Tensors, ctx: Any
) -> list[torch.Tensor | None]:
    """The gradients of sinks, query, key and value by plain products, for second derivatives."""
    query, key, value = of
    scores = _scores(query, key, reads, *ctx.given[:2])
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.ops.aten._safe_softmax(scores, -1)[..., : key.shape[2]]
    out = (weights @ _repeated(value, query).float()).to(query.dtype)
    needed: Any = [t for t, needs in zip((sinks, *of), ctx.needs_input_grad[2:6], strict=True) if needs]
    found = iter(torch.autograd.grad(out, needed, grad, create_graph=True))
    return [next(found) if needs else None for needs in ctx.needs_input_grad[2:6]]


def _slope(sinks: torch.Tensor, grad: torch.Tensor, out: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """The sinks' gradient: a sink's weight grows at the cost of the result."""
    given = (grad.float() * out.float()).sum(-1)
    weights = (sinks.float()[:, None] - sums).exp()
    return (weights * given).sum((0, 2)).neg().to(sinks.dtype)


def _below(query: Any, key: Any, value: Any, reads: Tensors, blocks: Tensors, *given: Any) -> Any:
    with compat.BelowAutograd():
        return torch.ops.dynamotor.masked_attention(query, key, value, list(reads), list(blocks), *given)


def _differentiable(
    query: Any, key: Any, value: Any, reads: Tensors, blocks: Tensors, mask: str, scale: float,
    stride: Sequence[int], sinks: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    given = mask, scale, stride
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, key, value, sinks)):
        return _Attention.apply(len(reads), given, sinks, query, key, value, *reads, *blocks)
    return _below(query, key, value, reads, blocks, *given, sinks)


_library.impl("masked_attention", _forward, "CompositeExplicitAutograd")
_library.impl("masked_attention_backward", _backward, "CompositeExplicitAutograd")
_library.impl("masked_attention", _differentiable, "Autograd")


@layout(torch.ops.dynamotor.masked_attention.default)
def _masked_attention_layout(
    query: TensorSpec, key: TensorSpec, value: TensorSpec, reads: Sequence[TensorSpec],
    blocks: Sequence[TensorSpec], mask: str, scale: float, stride: Sequence[int],
    sinks: TensorSpec | None = None,
) -> tuple[TensorSpec, TensorSpec]:  # fmt: skip
    require(query.shape[-1] == key.shape[-1] and query.shape[0] == key.shape[0])
    require(tuple(key.shape[:3]) == tuple(value.shape[:3]))
    require(sinks is None or tuple(sinks.shape) == (query.shape[1],))
    shape = (*query.shape[:3], value.shape[3])
    out = TensorSpec(shape, tuple(stride), query.dtype, query.device)
    return out, TensorSpec.dense(query.shape[:3], torch.float32, query.device)


@layout(torch.ops.dynamotor.masked_attention_backward.default)
def _masked_attention_backward_layout(
    grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec, *rest: Any
) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.shape, preserved_stride(t), t.dtype, t.device) for t in (query, key, value))
