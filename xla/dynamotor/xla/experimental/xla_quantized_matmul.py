"""Products with weights of 8 or 4 bits, which have a scale for each output or for each block of inputs.

>>> layer = XlaQuantizedLinear(64, 128, is_symmetric=True)
>>> layer.load_quantized_weight(weight, scale)  # int8 [128, 64], [128]
"""

from __future__ import annotations

import torch
import torch.ao.quantization.fx  # noqa: F401  (torch.ops.quantized_decomposed, which makes such weights)
import torch.nn.functional as F

from ..core.xla_builder import dot_general
from ..errors import require
from ..tensor import is_xla

torch.library.define(
    "xla::quantized_matmul",
    "(Tensor x, Tensor w, Tensor scaler, Tensor? zero_point=None, int block_size=-1, bool int4_weight=False, "
    "bool quantize_activation=False) -> Tensor",
)


def quantized_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    scaler: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    block_size: int = -1,
    int4_weight: bool = False,
    quantize_activation: bool = False,
) -> torch.Tensor:
    """`x [..., inputs]` times a weight of int8 [outputs, inputs], whose scale and zero point are [outputs];
    or in blocks, [inputs / block_size, block_size, outputs] and [inputs / block_size, outputs].

    zero_point: in the units of the scaled weight. int4_weight: the values have 4 bits, and come as int8.
    quantize_activation: x is rounded to 8 bits with a scale for each row; not for blocks. DM671 for shapes
    that do not fit.
    """
    _check(x.shape[-1], scaler.shape[-1], block_size, w, scaler, zero_point)
    if block_size != -1:
        what = "quantized_matmul rounds no activations for a weight of blocks"
        require(not quantize_activation, "DM671", what)
        x = x.unflatten(-1, (-1, block_size))
        out = torch.einsum("...sn,sn->...n", torch.einsum("...sc,scn->...sn", x, w.to(x.dtype)), scaler)
        return out if zero_point is None else out - x.sum(-1) @ zero_point
    if not quantize_activation:
        out = F.linear(x, w.to(x.dtype)) * scaler
        return out if zero_point is None else out - x.sum(-1, keepdim=True) * zero_point
    step = x.abs().amax(-1, keepdim=True) / 127
    rounded = (x / torch.where(step == 0, 1, step)).round().to(torch.int8)
    out = _integers(rounded, w) * scaler
    if zero_point is not None:
        out = out - rounded.to(x.dtype).sum(-1, keepdim=True) * zero_point
    return out * step


torch.library.impl("xla::quantized_matmul", "CompositeImplicitAutograd", quantized_matmul)


def _integers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """int8 by int8, added up in int32."""
    if is_xla(x):
        return dot_general(x, w, (([-1], [-1]), ((), ())), preferred_element_type=torch.int32)
    return F.linear(x.to(torch.int32), w.to(torch.int32))


def _check(
    inputs: int,
    outputs: int,
    block_size: int,
    w: torch.Tensor,
    scaler: torch.Tensor,
    zero_point: torch.Tensor | None,
) -> None:
    kinds = [w.dtype, w.shape, scaler.shape, None if zero_point is None else zero_point.shape]
    blocks = inputs // block_size
    scale = torch.Size((outputs,) if block_size == -1 else (blocks, outputs))
    weight = torch.Size((outputs, inputs) if block_size == -1 else (blocks, block_size, outputs))
    wanted = [torch.int8, weight, scale, None if zero_point is None else scale]
    require(
        kinds == wanted and (block_size == -1 or not inputs % block_size),
        "DM671",
        "a quantized weight does not fit",
        why=f"dtype, shapes of weight, scale and zero point: {kinds}, not {wanted}",
    )


class XlaQuantizedLinear(torch.nn.Module):
    """A linear layer without bias whose weight is int8: `quantized_matmul`."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        is_symmetric: bool = False,
        block_size: int = -1,
        int4_weight: bool = False,
        quantize_activation: bool = False,
    ) -> None:
        super().__init__()
        self.input_dim, self.output_dim, self.block_size = input_dim, output_dim, block_size
        self.is_symmetric, self.int4_weight, self.quantize_activation = (
            is_symmetric,
            int4_weight,
            quantize_activation,
        )
        self.register_buffer("weight", torch.zeros(output_dim, input_dim, dtype=torch.int8))
        self.register_buffer("weight_scaler", torch.zeros(output_dim))
        self.register_buffer("zero_point", None if is_symmetric else torch.zeros(output_dim))

    def load_quantized_weight(
        self, weight: torch.Tensor, weight_scaler: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> None:
        """Take a weight over, as `quantized_matmul` describes it."""
        _check(self.input_dim, self.output_dim, self.block_size, weight, weight_scaler, zero_point)
        self.weight, self.weight_scaler, self.zero_point = weight, weight_scaler, zero_point

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = {"int4_weight": self.int4_weight, "quantize_activation": self.quantize_activation}
        return torch.ops.xla.quantized_matmul(
            x, self.weight, self.weight_scaler, self.zero_point, self.block_size, **options
        )
