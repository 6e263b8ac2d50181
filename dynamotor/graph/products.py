"""`matmul` of tensors whose sizes are symbols. PyTorch's own asks for plain numbers before 2.13, and so does all
that calls it in C++: `linear` without a bias, attention by plain products.

A dispatch key of its own finds these tensors wherever C++ calls it; other ops fall through the key.
"""

from __future__ import annotations

from typing import Any

import torch

_KEY = torch._C._dispatch_key_parse("TESTING_ONLY_GenericWrapper")
_view = torch.ops.aten._unsafe_view
_library: list[torch.library.Library] = []  # that registers, as long as it lives


def extra_keys() -> torch._C.DispatchKeySet:
    """Dispatch keys for a tensor whose sizes are symbols."""
    if not _library:
        _library.append(torch.library.Library("_", "IMPL", "TESTING_ONLY_GenericWrapper"))
        _library[0].fallback(torch.library.fallthrough_kernel)
        _library.append(torch.library.Library("aten", "IMPL", "TESTING_ONLY_GenericWrapper"))
        _library[1].impl("matmul", matmul)
    return torch._C.DispatchKeySet(_KEY)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b`, in the products that eager takes: of matrices where the larger operand can be read as one."""
    if not a.dim() or not b.dim() or a.dim() < 3 > b.dim():
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            return torch.matmul(a, b)
    if a.dim() > 2 > b.dim() - 1 and _folds(a, b):
        rows = a.reshape(-1, a.shape[-1])
        folded = rows.mv(b) if b.dim() == 1 else rows.mm(b)
        return _view(folded, (*a.shape[:-1], *b.shape[1:]))
    if a.dim() < 3 and _folds(b.mT, a):
        folded = matmul(b.mT, a.t())
        return folded.mT if a.dim() == 2 else folded
    if a.dim() == 1:
        return matmul(a[None], b).squeeze(-2)
    if b.dim() == 1:
        return matmul(a, b[:, None]).squeeze(-1)
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    result = torch.bmm(*[x.expand(*batch, -1, -1).reshape(-1, *x.shape[-2:]) for x in (a, b)])
    return _view(result, (*batch, a.shape[-2], b.shape[-1]))


def _folds(large: torch.Tensor, small: torch.Tensor) -> bool:
    """Whether `large` is a matrix of all its rows, or copying it pays: its product's gradient is dense then."""
    if small.requires_grad:
        return True
    size, stride = large.shape, large.stride()
    return all(stride[d] == stride[d + 1] * size[d + 1] for d in range(large.dim() - 2))


def _broadcast(a: Any, b: Any) -> list[Any]:
    missing = max(len(a), len(b))
    sizes = [(1,) * (missing - len(shape)) + tuple(shape) for shape in (a, b)]
    return [y if x == 1 else x for x, y in zip(*sizes)]
