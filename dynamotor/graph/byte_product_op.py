"""`torch.ops.dynamotor.byte_product`: a matrix product with weights in bytes, which are converted on the way.

>>> y = torch.ops.dynamotor.byte_product(x, w.t(), None)     # x: [rows, k], w: bytes [n, k]
"""

from __future__ import annotations

import torch

from .op_definition import layout, require
from .spec import TensorSpec

_library = torch.library.Library("dynamotor", "FRAGMENT")
_ARGUMENTS = "Tensor x, Tensor weights, Tensor? bias"
_library.define(f"byte_product({_ARGUMENTS}) -> Tensor")
_library.define(f"byte_product.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")


def byte_product(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x times converted weights, [k, n], by PyTorch's own kernels."""
    wide = weights.to(x.dtype)
    return torch.mm(x, wide) if bias is None else torch.addmm(bias, x, wide)


def byte_product_out(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor
) -> torch.Tensor:
    """`byte_product` into the memory of `out`."""
    wide = weights.to(x.dtype)
    return torch.mm(x, wide, out=out) if bias is None else torch.addmm(bias, x, wide, out=out)


_library.impl("byte_product", byte_product, "CompositeExplicitAutograd")
_library.impl("byte_product.out", byte_product_out, "CompositeExplicitAutograd")


@layout(torch.ops.dynamotor.byte_product.default)
def _byte_product_layout(x: TensorSpec, weights: TensorSpec, bias: TensorSpec | None) -> TensorSpec:
    require(x.shape[1] == weights.shape[0])
    return TensorSpec.dense((x.shape[0], weights.shape[1]), x.dtype, x.device)
