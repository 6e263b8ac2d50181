"""Shapes of conversions between jagged and padded rows."""

from __future__ import annotations

import pytest
import torch

from dynamotor.graph.shapes import UnsupportedOp, infer_spec
from dynamotor.graph.sizes import ShapeEnv
from dynamotor.graph.spec import TensorSpec, aten

OFFSETS = torch.tensor([0, 2, 6, 7])


@pytest.mark.parametrize("shape", [(7, 5), (7, 2, 3)])
def test_specs_are_eagers(shape):
    x = torch.randn(shape)
    padded = aten._jagged_to_padded_dense_forward.default(x, [OFFSETS], [4])
    rows = aten._padded_dense_to_jagged_forward.default(padded, [OFFSETS], 7)
    offsets = TensorSpec.of(OFFSETS)
    found = infer_spec(aten._jagged_to_padded_dense_forward.default, (TensorSpec.of(x), [offsets], [4]), {})
    assert found == TensorSpec.of(padded)
    found = infer_spec(aten._padded_dense_to_jagged_forward.default, (found, [offsets], 7), {})
    assert found == TensorSpec.of(rows)


def test_sizes_may_be_symbols():
    env = ShapeEnv()
    rows, batch, longest = env.symbol(7), env.symbol(4), env.symbol(5)
    x, offsets = TensorSpec.dense((rows, 3), torch.float32), TensorSpec.dense((batch,), torch.int64)
    found = infer_spec(aten._jagged_to_padded_dense_forward.default, (x, [offsets], [longest]), {})
    assert str(found.shape) == "(s1 - 1, s2, 3)" and not env.guards


def test_rows_that_data_counts_are_refused():
    dense = TensorSpec.dense((3, 4, 5), torch.float32)
    with pytest.raises(UnsupportedOp, match="no shape rule"):
        infer_spec(aten._padded_dense_to_jagged_forward.default, (dense, [TensorSpec.of(OFFSETS)]), {})
