"""`torch.autocast("xla")`: kernels on the AutocastXLA dispatch key, one row an op.

PyTorch's lists for GPUs: products run in the lower type, ops that lose digits in float32, ops of several
inputs in the widest.

>>> with torch.autocast("xla", dtype=torch.bfloat16):
...     (x @ y).dtype
torch.bfloat16
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import compat

aten = torch.ops.aten
# The enum has no name for it; None is for a name that there is not.
_KEY = compat.DispatchKeySet(compat.parse_key_name("AutocastXLA"))

LOWER = (
    "_convolution _convolution.deprecated conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding "
    "conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv "
    "addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot "
    "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention "
)

FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss "
    "nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp norm.Scalar norm.ScalarOpt_dim "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa "
)

FLOAT32_RESULT = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList "
)

WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack"
)


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "xla"
        and value.dtype.is_floating_point
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors (also in lists) in `dtype`; float64 is the user's wish and stays."""
    if isinstance(value, (list, tuple)):
        return [_cast(v, dtype) for v in value]
    return value.to(dtype) if _eligible(value) and value.dtype is not dtype else value


def _cast_all(op: Callable, dtype: torch.dtype, args: tuple, kwargs: dict[str, Any]) -> Any:
    return op(*[_cast(a, dtype) for a in args], **{name: _cast(a, dtype) for name, a in kwargs.items()})


def _float32_result(op: compat.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Ask for float32 by the op's own `dtype` argument, unless the caller gave one."""
    position = [a.name for a in op._schema.arguments].index("dtype")
    dtype = args[position] if len(args) > position else kwargs.get("dtype")
    if dtype is not None or not _eligible(args[0]):
        return op(*args, **kwargs)
    return op(*args[:position], **{**kwargs, "dtype": torch.float32})


def _widest(op: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """All inputs in float32 if one of them is, otherwise in the lower type."""
    tensors = [v for v in compat.tree_leaves((args, kwargs)) if _eligible(v)]
    wide = any(v.dtype is torch.float32 for v in tensors)
    return _cast_all(op, torch.float32 if wide else torch.get_autocast_dtype("xla"), args, kwargs)


def _kernel(op: compat.OpOverload, policy: Callable) -> Callable:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with compat.ExcludeDispatchKeys(_KEY):
            return policy(op, args, kwargs)

    return kernel


def _overload(name: str) -> compat.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def install() -> list[torch.library.Library]:
    """Register the rows; ops without one fall through to the next key. The kernels live as long as the
    result.
    """
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastXLA")
    kernels = torch.library.Library("aten", "IMPL", "AutocastXLA")
    for names, policy in (
        (LOWER, lambda op, *given: _cast_all(op, torch.get_autocast_dtype("xla"), *given)),
        (FLOAT32, lambda op, *given: _cast_all(op, torch.float32, *given)),
        (FLOAT32_RESULT, _float32_result),
        (WIDEST, _widest),
    ):
        for name in names.split():
            kernels.impl(_overload(name), _kernel(_overload(name), policy))
    return [others, kernels]


_libraries = install()
