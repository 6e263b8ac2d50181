"""Weight-only quantisation for `python -m bench decode --weights NAME`: linear layers whose weights are bytes,
converted where they are multiplied.

>>> quantise(model, "int8")
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

GROUP = 32  # of int4 weights with a scale


class Int8Linear(nn.Module):
    """One int8 number a weight, one scale an output."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        w = linear.weight.detach()
        scale = w.float().abs().amax(1).clamp(min=1e-12) / 127
        self.register_buffer("weight", (w.float() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(w.dtype))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


class Int4Linear(nn.Module):
    """Two numbers a byte, one scale for each group of a row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        w = linear.weight.detach()
        groups = w.float().view(w.shape[0], -1, GROUP)
        scale = groups.abs().amax(2, keepdim=True).clamp(min=1e-12) / 7
        whole = ((groups / scale).round() + 8).to(torch.uint8).view(w.shape)
        self.register_buffer("weight", whole[:, ::2] | whole[:, 1::2] << 4)
        self.register_buffer("scale", scale.to(w.dtype))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.stack([self.weight & 15, self.weight >> 4], -1).to(x.dtype) - 8
        groups = numbers.view(self.weight.shape[0], -1, GROUP) * self.scale
        return F.linear(x, groups.flatten(1), self.bias)


def _replaced(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, make(child))


def _torchao(model: nn.Module) -> None:
    from torchao import quantization  # type: ignore[import-not-found,unused-ignore]

    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


SCHEMES: dict[str, Callable[[nn.Module], None]] = {
    "int8": lambda model: _replaced(model, Int8Linear),
    "int4": lambda model: _replaced(model, Int4Linear),
    "torchao": _torchao,
}


def quantise(model: nn.Module, weights: str) -> None:
    """Replace the weights of a model's linear layers; "": leave them."""
    if weights:
        SCHEMES[weights](model)
