"""`torch.ops.dynamotor.grouped_product`: matrix products of groups of rows, as aten's `_grouped_mm`, without
a bias and with a result of the operands' type.

>>> y = torch.ops.dynamotor.grouped_product(x, w, offs)     # x: [rows, k], w: [groups, k, n], offs: int32
"""

from __future__ import annotations

import torch

from .op_definition import layout
from .ops.linalg import grouped_layout
from .spec import TensorSpec, aten

_library = torch.library.Library("dynamotor", "FRAGMENT")
_ARGUMENTS = "Tensor a, Tensor b, Tensor offs"
_library.define(f"grouped_product({_ARGUMENTS}) -> Tensor")
_library.define(f"grouped_product.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")


def grouped_product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """By aten's own kernels."""
    return aten._grouped_mm.default(a, b, offs)


def grouped_product_out(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    """`grouped_product` into the memory of `out`."""
    return out.copy_(grouped_product(a, b, offs))


_library.impl("grouped_product", grouped_product, "CompositeExplicitAutograd")
_library.impl("grouped_product.out", grouped_product_out, "CompositeExplicitAutograd")


@layout(torch.ops.dynamotor.grouped_product.default)
def _grouped_product_layout(a: TensorSpec, b: TensorSpec, offs: TensorSpec) -> TensorSpec:
    return grouped_layout(a, b, offs)
