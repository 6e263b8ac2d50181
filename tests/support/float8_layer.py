"""A linear layer in float8 as torchao's trains it: each operand is rounded in both orders of dimensions that its
products want, with one scale a tensor or one a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: torch.Tensor, dtype: torch.dtype, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers in float8 and their scale; dim: the one that a scale goes along, None for all."""
    top = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    largest = torch.finfo(dtype).max
    scale = (largest / top.double().clamp(min=1e-12)).float()
    return (x.float() * scale).clamp(-largest, largest).to(dtype), scale


def times(a: torch.Tensor, b: torch.Tensor, scales: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The product of row-major rows and columns."""
    a, b = a.contiguous(), b.t().contiguous().t()
    return torch._scaled_mm(a, b, *[s.reciprocal() for s in scales], out_dtype=dtype)


@torch._dynamo.allow_in_graph
class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, rows: bool) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.rows = rows
        flat = x.reshape(-1, x.shape[-1])
        (a, s), (b, t) = (rounded(each, E4M3, 1 if rows else None) for each in (flat, w))
        return times(a, b.t(), [s, t.t() if rows else t], torch.bfloat16).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        g, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        kind, along, across = (E4M3, 1, 0) if ctx.rows else (E5M2, None, None)
        (a, s), (b, t) = rounded(g, kind, along), rounded(w, E4M3, across)
        of_x = times(a, b, [s, t], torch.bfloat16).reshape(*grad.shape[:-1], -1)
        (a, s), (b, t) = rounded(g, kind, across), rounded(x, E4M3, across)
        return of_x, times(a.t(), b, [s.t() if ctx.rows else s, t], torch.bfloat16).float(), None


class Float8Layer(nn.Linear):
    def __init__(self, inputs: int, outputs: int, rows: bool = False) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Float8Product.apply(x.bfloat16(), self.weight, self.rows)
