"""Functions with a number among their options, over tensors: the number is an input where it differs between calls.

The parameters have the names of PyTorch's, so that arguments are bound as there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def number(value: Any, like: torch.Tensor) -> Any:
    """A number as a tensor without dimensions that does not change the type of a result (a rule of the trace)."""
    raise NotImplementedError


def add(input: Any, other: Any, alpha: Any = 1) -> Any:
    return input + other * alpha


def sub(input: Any, other: Any, alpha: Any = 1) -> Any:
    return input - other * alpha


def rsub(input: Any, other: Any, alpha: Any = 1) -> Any:
    return other - input * alpha


def add_(input: Any, other: Any, alpha: Any = 1) -> Any:
    return input.add_(other * alpha)


def sub_(input: Any, other: Any, alpha: Any = 1) -> Any:
    return input.sub_(other * alpha)


def addcmul(input: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    return input + tensor1 * tensor2 * value


def addcdiv(input: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    return input + tensor1 / tensor2 * value


def addcmul_(input: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    return input.add_(tensor1 * tensor2 * value)


def addcdiv_(input: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    return input.add_(tensor1 / tensor2 * value)


def addmm(input: Any, mat1: Any, mat2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    product = torch.mm(mat1, mat2) * alpha
    return product if beta == 0 else input * beta + product


def baddbmm(input: Any, batch1: Any, batch2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    product = torch.bmm(batch1, batch2) * alpha
    return product if beta == 0 else input * beta + product


def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    return torch.clamp(input, number(min, input), number(max, input))


def clamp_min(input: Any, min: Any) -> Any:
    return torch.clamp_min(input, number(min, input))


def clamp_max(input: Any, max: Any) -> Any:
    return torch.clamp_max(input, number(max, input))


def clamp_(input: Any, min: Any = None, max: Any = None) -> Any:
    return input.clamp_(number(min, input), number(max, input))


def lerp(input: Any, end: Any, weight: Any) -> Any:
    return torch.lerp(input, end, number(weight, input))


def lerp_(input: Any, end: Any, weight: Any) -> Any:
    return input.lerp_(end, number(weight, input))


def masked_fill(input: Any, mask: Any, value: Any) -> Any:
    return torch.masked_fill(input, mask, number(value, input))


def masked_fill_(input: Any, mask: Any, value: Any) -> Any:
    return input.masked_fill_(mask, number(value, input))


def index_fill(input: Any, dim: Any, index: Any, value: Any) -> Any:
    return torch.index_fill(input, dim, index, number(value, input))


def fill_(input: Any, value: Any) -> Any:
    return input.fill_(number(value, input))


def full_like(input: Any, fill_value: Any) -> Any:
    return torch.zeros_like(input).fill_(number(fill_value, input))


def new_full(input: Any, size: Any, fill_value: Any) -> Any:
    return input.new_zeros(size).fill_(number(fill_value, input))


def full(size: Any, fill_value: Any, dtype: Any = None, device: Any = None) -> Any:
    made = torch.zeros(size, dtype=dtype or torch.get_default_dtype(), device=device)
    return made.fill_(number(fill_value, made))


def tensor(data: Any, dtype: Any = None, device: Any = None) -> Any:
    return full((), data, dtype, device)


def where(condition: Any, input: Any, other: Any) -> Any:
    like = (
        input if isinstance(input, torch.Tensor) else other if isinstance(other, torch.Tensor) else condition
    )
    return torch.where(condition, number(input, like), number(other, like))


def remainder(input: Any, other: Any) -> Any:
    return torch.remainder(input, number(other, input))


def fmod(input: Any, other: Any) -> Any:
    return torch.fmod(input, number(other, input))


def leaky_relu(input: Any, negative_slope: Any = 0.01) -> Any:
    return torch.where(input > 0, input, input * negative_slope)


def elu(input: Any, alpha: Any = 1.0) -> Any:
    return torch.where(input > 0, input, torch.expm1(input) * alpha)


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


def setitem(input: Any, key: Any, value: Any) -> Any:
    input[key] = number(value, input)


def pow(input: Any, exponent: Any) -> Any:
    if isinstance(input, torch.Tensor):
        if exponent == 0.5:  # eager's kernels for numbers take roots, which differ at -inf
            return torch.sqrt(input)
        if exponent == -0.5:
            return torch.rsqrt(input)
        return torch.pow(input, number(exponent, input))
    return torch.pow(number(input, exponent), exponent)
