"""Composite ops that reach the lowering whole instead of as their parts: attention and dropout.

>>> torch.nn.functional.scaled_dot_product_attention(q, k, v)  # on xla: one op, not eight
"""

from __future__ import annotations

import torch

from .lowering import decomposition

aten = torch.ops.aten


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
    if other_mask and attn_mask.dtype is not torch.float32:
        raise RuntimeError(
            f"attn_mask is {attn_mask.dtype}: it must be bool, float or as query, which is {query.dtype}"
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
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or input.numel() == 0:
        return input
    return aten.native_dropout(input, p, True)[0]


def install() -> torch.library.Library:
    """Register the rows for tensors with and without autograd. The kernels live as long as the result."""
    library = torch.library.Library("aten", "IMPL")
    for packet, rule in ((aten.scaled_dot_product_attention, _attention), (aten.dropout, _dropout)):
        library.impl(packet.default, rule, "AutogradXLA")
        decomposition(packet.default)(rule)  # in inference mode no autograd key is asked
    return library


_library = install()
