"""Functions with a number among their options, over tensors: the number is an input where it differs between
calls.

The parameters have the names of PyTorch's, so that arguments are bound as there. NotImplemented
stands for a call that is left to PyTorch, with the number as a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

Scalar = torch.Tensor | float  # a number, which may be an input of the graph

# From PyTorch 2.14 on, a value that equals the number it is clamped to has no gradient, nor has NaN; beside a tensor both
# have some.
_TIES_HAVE_GRADIENTS = torch.__version__ < "2.14"


def number(value: Scalar, like: torch.Tensor) -> Any:
    """A number as a tensor without dimensions that does not change the type of a result (a rule of the
    trace)."""
    raise NotImplementedError


_HALVES = (torch.float16, torch.bfloat16)


def add(input: torch.Tensor, other: Scalar, alpha: Scalar = 1) -> torch.Tensor:
    return input + other * alpha


def sub(input: torch.Tensor, other: Scalar, alpha: Scalar = 1) -> torch.Tensor:
    return input - other * alpha


def rsub(input: torch.Tensor, other: Scalar, alpha: Scalar = 1) -> torch.Tensor:
    return other - input * alpha


def add_(input: torch.Tensor, other: Scalar, alpha: Scalar = 1) -> torch.Tensor:
    return input.add_(other * alpha)


def sub_(input: torch.Tensor, other: Scalar, alpha: Scalar = 1) -> torch.Tensor:
    return input.sub_(other * alpha)


def addcmul(
    input: torch.Tensor, tensor1: torch.Tensor, tensor2: torch.Tensor, value: Scalar = 1
) -> torch.Tensor:
    return input + tensor1 * tensor2 * value


def addcdiv(
    input: torch.Tensor, tensor1: torch.Tensor, tensor2: torch.Tensor, value: Scalar = 1
) -> torch.Tensor:
    return input + tensor1 / tensor2 * value


def addcmul_(
    input: torch.Tensor, tensor1: torch.Tensor, tensor2: torch.Tensor, value: Scalar = 1
) -> torch.Tensor:
    return input.add_(tensor1 * tensor2 * value)


def addcdiv_(
    input: torch.Tensor, tensor1: torch.Tensor, tensor2: torch.Tensor, value: Scalar = 1
) -> torch.Tensor:
    return input.add_(tensor1 / tensor2 * value)


def addmm(
    input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, beta: Scalar = 1, alpha: Scalar = 1
) -> Any:
    if input.dim() > 2 or input.dtype != mat1.dtype:
        return NotImplemented
    product = torch.mm(mat1, mat2) * alpha
    return product if beta == 0 else input * beta + product


def baddbmm(
    input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, beta: Scalar = 1, alpha: Scalar = 1
) -> Any:
    if input.dim() > 3 or input.dtype != batch1.dtype:
        return NotImplemented
    product = torch.bmm(batch1, batch2) * alpha
    return product if beta == 0 else input * beta + product


def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    lower, upper = number(min, input), number(max, input)
    clamped = torch.clamp(input, lower, upper)
    if _TIES_HAVE_GRADIENTS or not input.requires_grad:
        return clamped
    if lower is not None:
        clamped = torch.where(input > lower, clamped, clamped.detach())
    return clamped if upper is None else torch.where(input < upper, clamped, clamped.detach())


def clamp_min(input: torch.Tensor, min: Scalar) -> torch.Tensor:
    return clamp(input, min)


def clamp_max(input: torch.Tensor, max: Scalar) -> torch.Tensor:
    return clamp(input, None, max)


def clamp_(input: Any, min: Any = None, max: Any = None) -> Any:
    if input.requires_grad and not _TIES_HAVE_GRADIENTS:
        return NotImplemented
    return input.clamp_(number(min, input), number(max, input))


def lerp(input: torch.Tensor, end: torch.Tensor, weight: Any) -> torch.Tensor:
    if input.dtype not in _HALVES:
        return torch.lerp(input, end, number(weight, input))
    # A tensor of the weight would be rounded: 0.999 is 1 then. Near 1 eager starts from the end, too.
    return input + (end - input) * weight if abs(weight) < 0.5 else end - (end - input) * (1 - weight)


def lerp_(input: torch.Tensor, end: torch.Tensor, weight: Scalar) -> torch.Tensor:
    return input.copy_(lerp(input, end, weight))


def masked_fill(input: torch.Tensor, mask: torch.Tensor, value: Scalar) -> torch.Tensor:
    return torch.masked_fill(input, mask, number(value, input))


def masked_fill_(input: torch.Tensor, mask: torch.Tensor, value: Scalar) -> torch.Tensor:
    return input.masked_fill_(mask, number(value, input))


def index_fill(input: torch.Tensor, dim: int, index: torch.Tensor, value: Scalar) -> torch.Tensor:
    return torch.index_fill(input, dim, index, number(value, input))


def fill_(input: torch.Tensor, value: Scalar) -> torch.Tensor:
    return input.fill_(number(value, input))


def full_like(input: torch.Tensor, fill_value: Scalar) -> torch.Tensor:
    return torch.fill(torch.zeros_like(input), number(fill_value, input))


def new_full(input: torch.Tensor, size: Sequence[int], fill_value: Scalar) -> torch.Tensor:
    return torch.fill(input.new_zeros(size), number(fill_value, input))


def full(
    size: Sequence[int],
    fill_value: Scalar,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Any:
    if dtype not in (None, torch.float32, torch.float64):
        return NotImplemented
    made = torch.zeros(size, dtype=dtype or torch.get_default_dtype(), device=device)
    return torch.fill(made, number(fill_value, made))  # `fill_` would count a write


def tensor(
    data: Scalar, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    return full((), data, dtype, device)


def where(condition: torch.Tensor, input: Scalar, other: Scalar) -> torch.Tensor:
    like = (
        input if isinstance(input, torch.Tensor) else other if isinstance(other, torch.Tensor) else condition
    )
    return torch.where(condition, number(input, like), number(other, like))


def remainder(input: torch.Tensor, other: Scalar) -> torch.Tensor:
    return torch.remainder(input, number(other, input))


def fmod(input: torch.Tensor, other: Scalar) -> torch.Tensor:
    return torch.fmod(input, number(other, input))


def leaky_relu(input: torch.Tensor, negative_slope: Scalar = 0.01) -> torch.Tensor:
    return torch.where(input > 0, input, input * negative_slope)


def elu(input: torch.Tensor, alpha: Scalar = 1.0) -> torch.Tensor:
    # The exponential of the unchosen side overflows, and its gradient would be 0 * inf.
    return torch.where(input <= 0, torch.expm1(torch.where(input <= 0, input, 0.0)) * alpha, input)


def celu(input: torch.Tensor, alpha: Scalar = 1.0) -> torch.Tensor:
    negative = torch.where(input <= 0, input, 0.0)
    return torch.where(input <= 0, torch.expm1(negative * (1 / alpha)) * alpha, input)


def softplus(input: torch.Tensor, beta: Scalar = 1.0, threshold: Scalar = 20.0) -> Any:
    if beta == 0:  # eager's gradient is finite where the result is not
        return NotImplemented
    scaled = input * beta
    linear = scaled > threshold
    return torch.where(linear, input, torch.log1p(torch.exp(torch.where(linear, 0.0, scaled))) / beta)


def threshold(input: torch.Tensor, threshold: Scalar, value: Scalar) -> torch.Tensor:
    return torch.where(_as_compared(input) <= threshold, number(value, input), input)


def hardtanh(input: torch.Tensor, min_val: Scalar = -1.0, max_val: Scalar = 1.0) -> torch.Tensor:
    if min_val > max_val:
        raise ValueError("min_val cannot be greater than max_val")
    seen = _as_compared(input)
    upper = torch.where(seen >= max_val, number(max_val, input), input)
    return torch.where(seen <= min_val, number(min_val, input), upper)


def _as_compared(input: torch.Tensor) -> torch.Tensor:
    """The input as kernels of 16 bits compare it with a number, which they do not round."""
    return input.float() if input.dtype in (torch.float16, torch.bfloat16) else input


def hardshrink(input: torch.Tensor, lambd: Scalar = 0.5) -> torch.Tensor:
    return torch.where((input >= -lambd) & (input <= lambd), 0.0, input)


def softshrink(input: torch.Tensor, lambd: Scalar = 0.5) -> torch.Tensor:
    if lambd < 0:
        raise RuntimeError("lambda must be greater or equal to 0")
    small = torch.where((input >= -lambd) & (input <= lambd), input * 0.0, input)  # not so of a NaN
    return torch.where(input > lambd, input - lambd, torch.where(input < -lambd, input + lambd, small))


def huber_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    weight: torch.Tensor | None = None,
    delta: Scalar = 1.0,
) -> Any:
    if delta <= 0 or weight is not None or input.shape != target.shape:
        return NotImplemented
    apart = torch.abs(input - target)
    small = torch.where(apart > delta, 0.0, apart)  # a square of the other branch would give inf * 0
    loss = torch.where(apart < delta, 0.5 * small * small, (apart - 0.5 * delta) * delta)
    return _reduced(loss, reduction)


def smooth_l1_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: Scalar = 1.0,
) -> Any:
    if beta <= 0 or size_average is not None or reduce is not None or input.shape != target.shape:
        return NotImplemented
    apart = torch.abs(input - target)
    small = torch.where(apart > beta, 0.0, apart)
    loss = torch.where(apart < beta, 0.5 * small * small / beta, apart - 0.5 * beta)
    return _reduced(loss, reduction)


def _reduced(loss: torch.Tensor, reduction: str) -> Any:
    if reduction == "mean":
        return torch.mean(loss)
    if reduction == "sum":
        return torch.sum(loss)
    return loss if reduction == "none" else NotImplemented


def pad(input: Any, pad: Any, mode: Any = "constant", value: Any = None) -> Any:
    if mode != "constant":
        return NotImplemented
    inside = F.pad(torch.ones_like(input, dtype=torch.bool), pad)
    return torch.where(inside, F.pad(input, pad), number(value, input))


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: Scalar = 1e-5,
) -> Any:
    dims = _last(input, normalized_shape)
    if dims is None or not _have_shape(normalized_shape, weight, bias):
        return NotImplemented
    variance, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    return _affine((input - mean) * torch.rsqrt(variance + eps), weight, bias)


def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    dims = _last(input, normalized_shape)
    if dims is None or not _have_shape(normalized_shape, weight):
        return NotImplemented
    return _affine(input * torch.rsqrt(torch.mean(input * input, dims, keepdim=True) + eps), weight, None)


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: Scalar = 1e-5,
) -> Any:
    usual = input.dim() > 1 and input.shape[1] % num_groups == 0 and input.is_contiguous()
    if not usual or input.numel() <= num_groups or not _have_shape(input.shape[1:2], weight, bias):
        return NotImplemented
    grouped = torch.flatten(torch.unflatten(input, 1, (num_groups, input.shape[1] // num_groups)), 2)
    variance, mean = torch.var_mean(grouped, [2], correction=0, keepdim=True)
    normed = torch.reshape((grouped - mean) * torch.rsqrt(variance + eps), input.shape)
    return _affine(normed, _by_channel(weight, input), _by_channel(bias, input))


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Any:
    usual = input.dim() > 1 and eps > 0 and (running_mean is None) == (running_var is None)
    if not usual or not _have_shape(input.shape[1:2], running_mean, running_var, weight, bias):
        return NotImplemented
    if training:
        count = input.numel() // input.shape[1]
        if count < 2:
            return NotImplemented
        dims = [d for d in range(input.dim()) if d != 1]
        variance, mean = torch.var_mean(input, dims, correction=0)
        if running_mean is not None:
            with torch.no_grad():
                running_mean.mul_(1 - momentum).add_(mean * momentum)
                running_var.mul_(1 - momentum).add_(variance * (count / (count - 1)) * momentum)
    else:
        mean, variance = running_mean, running_var
        if mean is None:
            return NotImplemented
    normed = (input - _by_channel(mean, input)) * _by_channel(torch.rsqrt(variance + eps), input)
    return _affine(normed, _by_channel(weight, input), _by_channel(bias, input))


def instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: Scalar = 0.1,
    eps: Scalar = 1e-5,
) -> Any:
    if input.dim() < 3 or not use_input_stats or running_mean is not None or running_var is not None:
        return NotImplemented
    channels = input.shape[1:2]
    if input.numel() <= input.shape[0] * input.shape[1] or not _have_shape(channels, weight, bias):
        return NotImplemented
    variance, mean = torch.var_mean(input, [*range(2, input.dim())], correction=0, keepdim=True)
    normed = (input - mean) * torch.rsqrt(variance + eps)
    return _affine(normed, _by_channel(weight, input), _by_channel(bias, input))


def _last(input: torch.Tensor, shape: Sequence[int]) -> list[int] | None:
    """The last dimensions, if they have this shape."""
    n = len(shape)
    return [*range(-n, 0)] if n and tuple(input.shape[-n:]) == tuple(shape) else None


def _have_shape(shape: Sequence[int], *parameters: Any) -> bool:
    """Whether the parameters that are there have a shape; eager raises where one would only broadcast."""
    return all(p is None or tuple(p.shape) == tuple(shape) for p in parameters)


def _by_channel(value: torch.Tensor | None, input: torch.Tensor) -> torch.Tensor | None:
    return None if value is None else torch.reshape(value, (1, -1) + (1,) * (input.dim() - 2))


def _affine(value: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if weight is not None:
        value = value * weight
    return value if bias is None else value + bias


def normalize(input: Any, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12, out: Any = None) -> Any:
    if out is not None:
        return NotImplemented
    return input / clamp_min(torch.norm(input, p, dim, True), eps)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
) -> Any:
    return F.scaled_dot_product_attention(
        query * scale, key, value, attn_mask, dropout_p, is_causal, scale=1.0
    )


def setitem(input: torch.Tensor, key: Any, value: Scalar) -> None:
    input[key] = number(value, input)


def pow(input: Any, exponent: Any) -> Any:
    if isinstance(input, torch.Tensor):
        if exponent == 0.5:  # eager's kernels for numbers take roots, which differ at -inf
            return torch.sqrt(input)
        if exponent == -0.5:
            return torch.rsqrt(input)
        return torch.pow(input, number(exponent, input))
    return torch.pow(number(input, exponent), exponent)


def nan_to_num(
    input: torch.Tensor, nan: Scalar | None = None, posinf: Scalar | None = None, neginf: Scalar | None = None
) -> Any:
    if not input.is_floating_point():
        return NotImplemented
    limits = torch.finfo(input.dtype)
    high = limits.max if posinf is None else number(posinf, input)
    low = limits.min if neginf is None else number(neginf, input)
    finite = torch.where(input == float("-inf"), low, torch.where(input == float("inf"), high, input))
    return torch.where(torch.isnan(input), 0.0 if nan is None else number(nan, input), finite)


def logit(input: torch.Tensor, eps: Scalar | None = None) -> Any:
    if eps is None or not 0 < eps < 0.5:
        return NotImplemented
    low = number(eps, input)
    inside = torch.clamp(input, low, 1 - low)
    return torch.log(inside / (1 - inside))


def cosine_similarity(x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: Scalar = 1e-8) -> Any:
    if not (x1.is_floating_point() and x2.is_floating_point()) or eps < 0:
        return NotImplemented
    return torch.sum(_at_unit_length(x1, x2, dim, eps) * _at_unit_length(x2, x1, dim, eps), dim)


def _at_unit_length(input: torch.Tensor, other: torch.Tensor, dim: int, eps: Scalar) -> torch.Tensor:
    """The input by its norm, which is at least `eps`; its gradient is the norm's, also below."""
    input = torch.broadcast_to(input, torch.broadcast_shapes(input.shape, other.shape))
    norm = torch.linalg.vector_norm(input, 2, dim, True)
    raised = torch.clamp_min(norm, number(eps, input)) - norm
    return input / (norm + raised.detach())


def linspace(
    start: Scalar,
    end: Scalar,
    steps: int,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Any:
    usual = dtype in (None, torch.float32) and torch.get_default_dtype() == torch.float32
    if not usual or steps < 2 or isinstance(start, torch.Tensor) or isinstance(end, torch.Tensor):
        return NotImplemented
    i = torch.arange(steps, dtype=torch.float32, device=device)
    first, last = number(start, i), number(end, i)
    step = (last - first) / (steps - 1)
    return torch.where(i < steps // 2, first + step * i, last - step * (steps - 1 - i))


def isclose(
    input: torch.Tensor, other: Scalar, rtol: Scalar = 1e-05, atol: Scalar = 1e-08, equal_nan: bool = False
) -> Any:
    if equal_nan or rtol < 0 or atol < 0 or not isinstance(other, torch.Tensor):
        return NotImplemented
    apart = torch.abs(input - other)
    near = torch.isfinite(apart) & (apart <= torch.abs(other * rtol) + atol)
    return (input == other) | near


def quantile(
    input: torch.Tensor,
    q: Scalar,
    dim: int | None = None,
    keepdim: bool = False,
    interpolation: str = "linear",
    out: torch.Tensor | None = None,
) -> Any:
    if out is not None or not 0 <= q <= 1:
        return NotImplemented
    return torch.quantile(input, number(q, input), dim, keepdim, interpolation=interpolation)


def renorm(input: torch.Tensor, p: Scalar, dim: int, maxnorm: Scalar) -> Any:
    if maxnorm < 0 or input.dim() < 2 or isinstance(p, torch.Tensor):
        return NotImplemented
    others = [d for d in range(input.dim()) if d != dim % input.dim()]
    norm = torch.linalg.vector_norm(input, p, others, True)
    return input * torch.where(norm > maxnorm, number(maxnorm, input) / (norm + 1e-7), 1.0)


def triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: Any = 1.0,
    p: Any = 2,
    eps: Any = 1e-6,
    swap: Any = False,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Any = "mean",
) -> Any:
    usual = margin > 0 and (size_average, reduce) == (None, None)
    if not usual or not anchor.dim() == positive.dim() == negative.dim():
        return NotImplemented
    near = F.pairwise_distance(anchor, positive, p, eps)
    far = F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced(torch.clamp_min(near - far + margin, 0), reduction)


def margin_ranking_loss(
    input1: torch.Tensor,
    input2: torch.Tensor,
    target: torch.Tensor,
    margin: Scalar = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if (size_average, reduce) != (None, None) or not input1.dim() == input2.dim() == target.dim():
        return NotImplemented
    return _reduced(torch.clamp_min(-target * (input1 - input2) + margin, 0), reduction)
