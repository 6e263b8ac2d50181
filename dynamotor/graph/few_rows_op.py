"""`torch.ops.dynamotor.few_rows_product`: a matrix product of few rows in parts, each part's sums apart.

>>> y = torch.ops.dynamotor.few_rows_product(x, [w.t()], 4)     # x: [1, rows, k], w: [n, k]
>>> y.shape                                                     # float32, to be added up by who reads it
torch.Size([4, rows, n])

Weights that are computed from bytes with several numbers each come as one matrix for each of these, and the
places of x that belong to it as one matrix of x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .op_definition import layout, require
from .spec import TensorSpec

_library = torch.library.Library("dynamotor", "FRAGMENT")
_ARGUMENTS = "Tensor x, Tensor[] weights, int parts"
_library.define(f"few_rows_product({_ARGUMENTS}) -> Tensor")
_library.define(f"few_rows_product.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")


def few_rows_product(x: torch.Tensor, weights: Sequence[torch.Tensor], parts: int) -> torch.Tensor:
    """Sums over each of `parts` stretches of k, by PyTorch's own kernels: where no template can be built."""
    out = torch.empty((parts, x.shape[1], weights[0].shape[1]), dtype=torch.float32, device=x.device)
    return few_rows_product_out(x, weights, parts, out=out)


def few_rows_product_out(
    x: torch.Tensor, weights: Sequence[torch.Tensor], parts: int, *, out: torch.Tensor
) -> torch.Tensor:
    """`few_rows_product` into the memory of `out`."""
    out.zero_()
    for rows, matrix in zip(x, weights, strict=True):
        a = rows.unflatten(1, (parts, -1)).transpose(0, 1)
        out.baddbmm_(a.float(), matrix.unflatten(0, (parts, -1)).float())
    return out


_library.impl("few_rows_product", few_rows_product, "CompositeExplicitAutograd")
_library.impl("few_rows_product.out", few_rows_product_out, "CompositeExplicitAutograd")


@layout(torch.ops.dynamotor.few_rows_product.default)
def _few_rows_product_layout(x: TensorSpec, weights: Sequence[TensorSpec], parts: int) -> TensorSpec:
    require(x.shape[0] == len(weights) and x.shape[2] % parts == 0)
    require(all(w.shape[0] == x.shape[2] for w in weights))
    return TensorSpec.dense((parts, x.shape[1], weights[0].shape[1]), torch.float32, x.device)
