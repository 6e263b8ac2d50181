"""PyTorch takes other kernels for plain tensors than for subclasses, which trials run on: results lie as
eager's all the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynamotor
from fuzz.compare import differences, observe

aten = torch.ops.aten


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("pool", [torch.max_pool1d, torch.nn.functional.max_pool1d])
def test_pools_without_a_gradient_are_row_major(
    pool: Any, backend: str, wants: bool, order: tuple[int, ...]
) -> None:
    def inputs() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(5, 6, 4).permute(order).detach().requires_grad_(wants)]

    def pooled(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (pool(x, 2),)

    compiled = dynamotor.compile(pooled, backend=backend)
    assert differences(observe(pooled, inputs(), (0,)), observe(compiled, inputs(), (0,))) == []
    with torch.no_grad():
        assert compiled(*inputs())[0].stride() == pooled(*inputs())[0].stride()


@pytest.mark.parametrize("training", [False, True])
def test_batch_norms_that_write_statistics(training: bool) -> None:
    def legit(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple:
        return aten._native_batch_norm_legit(x, w, w, mean, var, training, 0.1, 1e-5)

    def updated(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple:
        return aten._batch_norm_with_update(x, w, w, mean, var, 0.1, 1e-5)

    def inputs() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(5, 3, 4).permute(2, 1, 0), torch.randn(3), torch.randn(3), torch.rand(3)]

    for norm in (legit, updated):
        eager = observe(norm, inputs(), ())
        assert differences(eager, observe(dynamotor.compile(norm), inputs(), ())) == []
