"""How far rounding alone moves a graph's results: the graph runs again, op by op, with all that is
rounded moved about.

A compiler that is right rounds otherwise than eager does, so values that hang on roundings (a difference of
equal numbers, a gradient that is zero, a comparison of two sums) may differ. No tolerance is written down for
them: an element may be a few times as far from eager's as it moved in these runs, and one that no run moves
must
be equal.

>>> runs = [evaluate(gm, inputs, compute=Moved(seed)) for seed in range(RUNS)]
>>> beyond(got, want, [run[node] for run in runs])      # which elements rounding does not explain
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..base import compat
from ..base.compat import tree_map
from ..graph.kernel_checks import sees_twice
from ..graph.op_facts import facts
from ..graph.spec import TensorSpec

RUNS = 10
FACTOR = 8  # times the farthest of so many random moves
_UNIT = {
    torch.float64: 2.0**-52,
    torch.float32: 2.0**-23,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.complex64: 2.0**-23,
    torch.complex128: 2.0**-52,
}
# Ops that give numbers that they are given: nothing is rounded. (A cast to a narrower type does round.)
_EXACT = frozenset((
    "abs", "neg", "relu", "relu_", "sign", "sgn", "floor", "ceil", "trunc", "round", "where", "masked_fill",
    "clamp", "clamp_min", "clamp_max", "hardtanh", "maximum", "minimum", "max", "min", "amax", "amin",
    "aminmax", "sort", "topk", "kthvalue", "median", "mode", "cummax", "cummin", "index", "_unsafe_index",
    "index_select", "gather", "embedding", "take", "cat", "stack", "clone", "copy", "flip", "roll", "repeat",
    "expand_copy", "constant_pad_nd", "slice_scatter", "select_scatter", "diagonal_scatter",
    "as_strided_scatter", "index_put", "_unsafe_index_put", "index_fill", "index_copy", "scatter",
    "masked_scatter", "slice_backward", "select_backward", "threshold_backward", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "tril", "argmax", "argmin", "argsort", "msort", "searchsorted", "bucketize",
    "any", "all", "nonzero", "count_nonzero", "triu", "full", "full_like", "fill", "zeros", "ones",
    "zeros_like", "ones_like", "empty", "empty_like", "arange", "eye", "scalar_tensor", "new_full",
    "new_zeros", "new_ones", "new_empty", "rand", "randn", "bernoulli", "uniform", "normal_functional",
    "randn_like", "rand_like", "lift_fresh_copy", "contiguous", "_to_copy", "_unsafe_view", "reshape",
))  # fmt: skip


class Moved:
    """Computes a node as another rounding might have: results are moved, and operands of what adds many of
    them up.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> Any:
        op = node.target
        if not isinstance(op, compat.OpOverload) or facts(op).is_view:
            return target(*args, **kwargs)
        about, exact = facts(op), op.overloadpacket.__name__ in _EXACT
        if not about.pointwise and not exact:
            args, kwargs = tree_map(self._about, (args, kwargs))
        result = target(*args, **kwargs)
        return result if exact and not _narrows(op, args, result) else tree_map(self._about, result)

    def _about(self, value: Any) -> Any:
        """A tensor whose elements are a few roundings off."""
        unit = _UNIT.get(value.dtype) if isinstance(value, torch.Tensor) else None
        if unit is None or value.layout is not torch.strided or not value.numel():
            return value
        noise = (
            torch.rand(value.shape, generator=self.generator, dtype=torch.float64, device="cpu") * 4 - 2
        ).to(value.device)
        wide = value.to(torch.complex128 if value.is_complex() else torch.float64)
        moved = torch.where(torch.isfinite(wide), wide * (1 + unit * noise), wide).to(value.dtype)
        if sees_twice(TensorSpec.of(value)):
            return moved
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(
            moved
        )


def _narrows(op: Any, args: Any, result: Any) -> bool:
    return (
        op is torch.ops.aten._to_copy.default
        and result.is_floating_point()
        and result.dtype.itemsize < args[0].dtype.itemsize
    )


def beyond(got: torch.Tensor, want: torch.Tensor, runs: list[torch.Tensor]) -> torch.Tensor:
    """The elements of `got` that are farther from `want` than FACTOR times where any run has them."""
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        off = got != want
        for run in runs:
            off &= run == want  # where rounding decides, any number may be right
        return off
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    a, b, others = got.to(wide), want.to(wide), [run.to(wide) for run in runs]
    reach = torch.zeros(a.shape, dtype=torch.float64, device=a.device)
    sure = torch.ones(
        a.shape, dtype=torch.bool, device=a.device
    )  # not infinite in one run and finite in another
    for z in others:
        sure &= (z.isfinite() & b.isfinite()) | (z == b) | (z.isnan() & b.isnan())
        reach = torch.maximum(reach, (z - b).abs().nan_to_num(0, 0, 0))
    near = (a - b).abs() <= FACTOR * reach + 2 * _UNIT[got.dtype] * b.abs().nan_to_num(0, 0, 0)
    return ~(near | (a == b) | (a.isnan() & b.isnan())) & sure
