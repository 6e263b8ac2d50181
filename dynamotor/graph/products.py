"""`matmul`, `grid_sampler` and packed sequences of tensors whose sizes are symbols. Before 2.13 PyTorch's own
`matmul` asks for plain numbers, and so does all that calls it in C++: `linear` without a bias, attention by
plain products. One way serves all versions.

A dispatch key of its own finds these tensors wherever C++ calls it; other ops fall through the key.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from ..base import compat
from .sizes import DataDependent

_NAME = "TESTING_ONLY_GenericWrapper"
_view = torch.ops.aten._unsafe_view
_libraries: list[torch.library.Library] = []  # they register as long as they live


# Composites that read memory in C++: where sizes are symbols PyTorch does not find that there is none.
_READ_DATA = (
    *("gru.data", "lstm.data", "rnn_tanh.data", "rnn_relu.data"),
    *("fbgemm_pack_gemm_matrix_fp16", "fbgemm_pack_quantized_matrix", "fbgemm_linear_quantize_weight"),
    "_saturate_weight_to_fp16",
)


@functools.cache
def extra_keys() -> Any:
    """Dispatch keys for a tensor whose sizes are symbols."""
    _libraries.extend(torch.library.Library(of, "IMPL", _NAME) for of in ("_", "aten"))
    _libraries[0].fallback(torch.library.fallthrough_kernel)
    _libraries[1].impl("matmul", matmul)
    _libraries[1].impl("grid_sampler", grid_sampler)
    for name in _READ_DATA:
        _libraries[1].impl(name, functools.partial(_needs_data, name))
    return compat.DispatchKeySet(compat.parse_dispatch_key(_NAME))


def _needs_data(name: str, *args: Any) -> Any:
    raise DataDependent("DM210", f"aten.{name} reads tensor data that a trace does not have")


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b`, in eager's products: of two matrices where the first operand can be read as one."""
    if a.dim() < 3 > b.dim() or 0 in (a.dim(), b.dim()):
        with compat.ExcludeDispatchKeys(extra_keys()):
            return torch.matmul(a, b)
    if 1 in (a.dim(), b.dim()):
        return matmul(a[None], b).squeeze(-2) if a.dim() == 1 else matmul(a, b[:, None]).squeeze(-1)
    rows = (a.stride(d) == a.stride(d + 1) * a.shape[d + 1] for d in range(a.dim() - 2))  # as of one matrix
    if b.dim() == 2 and (b.requires_grad or all(rows)):
        return _view(a.reshape(-1, a.shape[-1]).mm(b), (*a.shape[:-1], b.shape[-1]))
    sizes = itertools.zip_longest(*[reversed(x.shape[:-2]) for x in (a, b)], fillvalue=1)
    batch: list[Any] = [m if n == 1 else n for n, m in sizes][::-1]
    result = torch.bmm(*[x.expand(*batch, -1, -1).reshape(-1, *x.shape[-2:]) for x in (a, b)])
    return _view(result, (*batch, a.shape[-2], b.shape[-1]))


def grid_sampler(x: torch.Tensor, grid: torch.Tensor, *how: Any) -> torch.Tensor:
    """The op of so many dimensions; the composite asks for plain numbers, and on a GPU may take cuDNN's."""
    if x.dim() == grid.dim() and x.dim() in (4, 5) and x.device.type == "cpu":
        op = torch.ops.aten.grid_sampler_2d if x.dim() == 4 else torch.ops.aten.grid_sampler_3d
        return op(x, grid, *how)
    with compat.ExcludeDispatchKeys(extra_keys()):
        return torch.grid_sampler(x, grid, *how)
