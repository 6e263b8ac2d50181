"""Jagged rows beside padded ones: what PyTorch's jagged tensors convert with."""

from __future__ import annotations

from collections.abc import Sequence

from ..op_definition import Unknown, layout
from ..sizes import Dim
from ..spec import TensorSpec, aten


@layout(aten._jagged_to_padded_dense_forward.default)
def _padded(
    values: TensorSpec, offsets: Sequence[TensorSpec], max_lengths: Sequence[Dim], padding_value: float = 0.0
) -> TensorSpec:
    shape = (offsets[0].shape[0] - 1, *max_lengths, *values.shape[1:])
    return TensorSpec.dense(shape, values.dtype, values.device)


@layout(aten._padded_dense_to_jagged_forward.default)
def _jagged(dense: TensorSpec, offsets: Sequence[TensorSpec], total: Dim | None = None) -> TensorSpec:
    if total is None:  # the last offset
        raise Unknown
    return TensorSpec.dense((total, *dense.shape[len(offsets) + 1 :]), dense.dtype, dense.device)
