"""Ops that only a GPU's eager calls, with sizes that differ between calls: shapes without an assumption, and
equal to the meta kernels' at other sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynamotor.graph.shapes import infer_spec
from dynamotor.graph.sizes import ShapeEnv
from dynamotor.graph.spec import TensorSpec, contiguous_stride

aten = torch.ops.aten


def _heads(batch: Any, length: Any, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec((batch, 12, length, 64), (length * 768, 64, 768, 1), dtype, torch.device("cuda", 0))


def _efficient(q: TensorSpec, k: TensorSpec, mask: TensorSpec | None) -> tuple[Any, ...]:
    forward = infer_spec(aten._scaled_dot_product_efficient_attention.default, (q, k, k, mask, True), {})
    keeps = (q, q, k, k, mask, *forward, 0.0, [True, True, True, False])
    return (*forward, *infer_spec(aten._scaled_dot_product_efficient_attention_backward.default, keeps, {}))


def _flash(q: TensorSpec, k: TensorSpec) -> tuple[Any, ...]:
    forward = infer_spec(aten._scaled_dot_product_flash_attention.default, (q, k, k), {})
    keeps = (q, q, k, k, *forward[:6], 0.0, False, *forward[6:8])
    return (*forward, *infer_spec(aten._scaled_dot_product_flash_attention_backward.default, keeps, {}))


def _cudnn(q: TensorSpec, k: TensorSpec, mask: TensorSpec) -> tuple[Any, ...]:
    forward = infer_spec(aten._scaled_dot_product_cudnn_attention.default, (q, k, k, mask, True), {})
    keeps = (q, q, k, k, *forward[:2], *forward[6:8], mask, *forward[2:6], 0.0, False)
    return (*forward, *infer_spec(aten._scaled_dot_product_cudnn_attention_backward.default, keeps, {}))


def _batch_norm(batch: Any, height: Any, width: Any) -> tuple[TensorSpec, ...]:
    device = torch.device("cuda", 0)
    x = TensorSpec.dense((batch, 8, (height + 1) // 2, width), torch.float32, device)
    rows = [TensorSpec.dense((8,), torch.float32, device)] * 4
    return infer_spec(aten.cudnn_batch_norm.default, (x, *rows, True, 0.1, 1e-5), {})


@pytest.mark.parametrize("kind", ["efficient", "masked", "flash", "cudnn", "batch norm"])
def test_shapes_hold_at_all_sizes(kind: str) -> None:
    def found(batch: Any, queries: Any, keys: Any) -> tuple[Any, ...]:
        dtype = torch.float32 if kind in ("efficient", "masked") else torch.bfloat16
        q, k = _heads(batch, queries, dtype), _heads(batch, keys, dtype)
        if kind == "batch norm":
            return _batch_norm(batch, queries, keys)
        if kind == "flash":
            return _flash(q, k)
        shape = (batch, 1, queries, keys)
        mask = TensorSpec(shape, contiguous_stride(shape), dtype, q.device) if kind != "efficient" else None
        if kind == "cudnn":
            return _cudnn(q, k, mask)
        return _efficient(q, k, mask)

    env = ShapeEnv()
    b, n, m = (env.symbol(size, name=name) for size, name in ((5, "b"), (40, "n"), (70, "m")))
    general = found(b, n, m)
    assert not env.guards
    for values in ((2, 3, 9), (7, 64, 33), (3, 65, 64)):
        of = dict(zip(env.symbols, values))
        for one, want in zip(general, found(*values), strict=True):
            assert (
                one.at(of) if isinstance(one, TensorSpec) else one if one is None else one.value(of)
            ) == want
