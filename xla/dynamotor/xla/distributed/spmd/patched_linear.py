"""Linear layers that keep their batch dimensions apart, so that XLA can keep those divided over a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


class XLAPatchedLinear:
    """`torch.nn.functional.linear` without folding the batch dimensions into one, which XLA could not keep
    divided over a mesh: `XLAPatchedLinear.apply(input, weight, bias)`."""

    @staticmethod
    def apply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """input @ weight.T + bias."""
        if torch.is_autocast_enabled("xla"):
            dtype = torch.get_autocast_dtype("xla")
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        batch = "abcdefghijkl"[: input.dim() - 1]
        product = torch.ops.dynamotor_xla.contraction(input, weight, f"{batch}n,mn->{batch}m")
        return product if bias is None else product + bias


def xla_patched_nn_linear_forward(m: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward pass of an `nn.Linear`, its batch dimensions not folded into one."""
    return XLAPatchedLinear.apply(input, m.weight, m.bias)


def apply_xla_patch_to_nn_linear(
    module: torch.nn.Module,
    patched_function: Callable[[torch.nn.Linear, torch.Tensor], torch.Tensor] = xla_patched_nn_linear_forward,
) -> torch.nn.Module:
    """Let `patched_function(layer, input)` be the forward pass of each `nn.Linear` of a module; the module is
    returned."""
    for part in module.modules():
        if isinstance(part, torch.nn.Linear):
            part.__dict__["forward"] = functools.partial(patched_function, part)
    return module
