"""Ops that PyTorch's own decompositions say as well as a rule would. Each is recorded as one op; what it
consists of is traced, once for each kind of arguments, where it is lowered. And composite ops that reach the
lowering whole: attention, dropout, CTC.

>>> torch.nn.functional.layer_norm(x, [64])     # one recorded op: "xla::native_layer_norm"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import torch

from dynamotor.extension_api import XlaError

from . import compat
from .compat import tree_flatten
from .dtypes import jax_dtype, torch_dtype
from .ir import Meta
from .lowering import Lifted, Unsupported, aten, composite, decomposition, decompositions, op
from .promotion import is_array
from .recent import Recent
from .subgraph import trace_call

prims = torch.ops.prims
_DEVICE = torch.device("xla", 0)  # whichever: nothing of the program is kept but its instructions
_programs = Recent(1024)


def parts_of(func: Callable[..., Any], *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """The rule: the decomposition on arrays; where all results are empty, nothing."""
    args = tuple(arg.array if type(arg) is Lifted else arg for arg in args)
    specs = out if type(out) is tuple else (out,)
    if out is not None and all(spec is None or 0 in spec.shape for spec in specs):
        nothing = [spec and jnp.zeros(spec.shape, jax_dtype(spec.dtype)) for spec in specs]
        return nothing if type(out) is tuple else nothing[0]
    leaves, tree = tree_flatten((args, kwargs))
    metas = {i: Meta.of(x.shape, torch_dtype(x.dtype)) for i, x in enumerate(leaves) if is_array(x)}
    key = (func, tree, *[metas.get(i, (type(leaf), str(leaf))) for i, leaf in enumerate(leaves)])
    if key not in _programs:
        made: list[bool] = []

        def traced(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            decomposed = decompositions.get(func) or compat.decomposition_table[func]
            results = decomposed(*args, **kwargs)
            results = [results] if isinstance(results, torch.Tensor) else results
            made[:] = [result is not None for result in results]
            return [result for result in results if result is not None]

        try:
            sub, _ = trace_call(traced, leaves, tree, metas, _DEVICE, str(func))
        except XlaError as error:
            raise Unsupported(str(error)) from error
        for step in sub.graph.steps.values():  # parts are no operations of the program
            step.instruction.uses -= step.item < 0
        _programs[key] = sub.call, made
    program, made = _programs.get(key)
    found = iter(program(*[leaves[i] for i in metas]))
    results = [next(found) if there else None for there in made]
    if type(out) is not tuple:
        return results[0]
    # What batch norm keeps for its backward in inference is empty on some devices.
    return [jnp.zeros(spec.shape) if spec and 0 in spec.shape else r for r, spec in zip(results, out)]


@decomposition(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_in_inference(x, weight, bias, mean, variance, momentum, eps):
    # Not by the op, which takes numbers: eps is a tensor while this is traced.
    functional = compat.decomposition_table[aten._native_batch_norm_legit_functional.default]
    return functional(x, weight, bias, mean, variance, False, momentum, eps)[:3]


for _target in (
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm_backward.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_backward.default,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten._euclidean_dist.default,
):
    momenta = (float,) if "batch_norm" in str(_target) else ()  # differ from batch to batch without one
    op(_target, out=True, lift=momenta)(partial(parts_of, _target))

# What these decompositions are made of beside aten's ops.
for _prim in (prims.broadcast_in_dim.default, prims.div.default, prims.sum.default, prims.var.default):
    decomposition(_prim)(vars(_prim)["impl_aten"])  # set by torch._prims


# -- composites that are recorded whole ----------------------------------------------------------------------


@composite(aten.scaled_dot_product_attention.default)
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


@composite(aten.dropout.default)
def _dropout(input, p, train):  # noqa: A002 - aten's name
    """One op that keeps a boolean mask, where the composite keeps a tensor of factors."""
    torch._check(0 <= p <= 1, lambda: f"dropout probability has to be between 0 and 1, but got {p}")
    return input if p == 0 or not train or input.numel() == 0 else aten.native_dropout(input, p, True)[0]


@composite(aten.ctc_loss.Tensor)
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
