"""Composite ops that reach the lowering whole instead of as their parts: attention and dropout.

>>> torch.nn.functional.scaled_dot_product_attention(q, k, v)  # on xla: one op, not eight
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .lowering import aten, decomposition


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """The fused form of aten's CPU kernels where it has one (4-D, no dropout, no gradient of the mask), else
    the plain ops.
    """
    if (
        attn_mask is not None and attn_mask.dtype is torch.bool
    ):  # aten's composite says which places are seen, its parts add
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    shapes = (query.dim(), key.dim(), value.dim()) == (4, 4, 4) and query.shape[:2] == key.shape[
        :2
    ] == value.shape[:2]
    mask_needs_gradient = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    other_mask = attn_mask is not None and attn_mask.dtype is not query.dtype
    torch._check(
        not other_mask or attn_mask.dtype is torch.float32,
        lambda: f"attn_mask is {attn_mask.dtype}: it must be bool, float or as query, which is {query.dtype}",
    )
    plain = dropout_p or mask_needs_gradient or other_mask or not query.is_floating_point()
    if not shapes or plain or query.shape[-1] != value.shape[-1]:
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    fused = aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _dropout(input, p, train):  # noqa: A002 - aten's name
    """One op that keeps a boolean mask, where the composite keeps a tensor of factors."""
    torch._check(0 <= p <= 1, lambda: f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    return aten.native_dropout(input, p, True)[0]


def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False):
    """Lengths may be on the CPU, which aten's composite, once it has the losses, divides them by."""
    lengths = [
        torch.as_tensor(n, dtype=torch.int64, device=log_probs.device)
        for n in (input_lengths, target_lengths)
    ]
    rows = log_probs if log_probs.dim() == 3 else log_probs[:, None]
    loss = aten._ctc_loss(rows, targets, *lengths, blank, zero_infinity)[0]
    loss = torch.where(loss == float("inf"), 0, loss) if zero_infinity else loss
    if reduction == 1:
        return (loss / lengths[1].reshape(-1).clamp(min=1)).mean()
    return loss.sum() if reduction == 2 else loss.reshape(log_probs.shape[1:-1])


def install() -> torch.library.Library:
    """Register the rows for tensors with and without autograd. The kernels live as long as the result."""
    library = torch.library.Library("aten", "IMPL")
    rules: dict[torch._ops.OpOverload, Callable] = {
        aten.scaled_dot_product_attention.default: _attention,
        aten.dropout.default: _dropout,
        aten.ctc_loss.Tensor: _ctc_loss,
    }
    for func, rule in rules.items():
        library.impl(func, rule, "AutogradXLA")
        decomposition(func)(rule)  # in inference mode no autograd key is asked
    return library


_library = install()
