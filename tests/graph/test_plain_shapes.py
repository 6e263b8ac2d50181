"""Shapes without a meta kernel: as eager has them, and refused where eager refuses sizes (types are what
`kernel_checks` asks kernels).
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.graph.shapes import infer_spec
from dynamotor.graph.spec import TensorSpec

aten = torch.ops.aten


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def last(*shape: int) -> torch.Tensor:
    return x(*shape).contiguous(memory_format=torch.channels_last)


def turned(*shape: int) -> torch.Tensor:
    return x(*reversed(shape)).permute(*reversed(range(len(shape))))


AT = torch.zeros(2, dtype=torch.int64)
CASES: list[tuple[Any, ...]] = [
    (aten.cat.default, [last(2, 3, 4, 5), last(2, 1, 4, 5)], 1),
    (aten.cat.default, [last(2, 3, 4, 5), x(2, 3, 4, 5)], 1),
    (aten.cat.default, [x(0), last(5, 2, 7, 7), x(0)], -1),
    (aten.cat.default, [turned(2, 3), x(2, 3)], 2),
    (aten.stack.default, [turned(2, 3), turned(2, 3)], 2),
    (aten.stack.default, [turned(2, 3, 4), turned(2, 3, 4)], 3),
    (aten.diag_embed.default, turned(2, 1)),
    (aten.sum.dim_IntList, turned(2, 3, 4), [1], True),
    (aten.amax.default, turned(2, 3, 4), [-1]),
    (aten.linalg_vector_norm.default, x(5), 2, [-2]),
    (aten.linalg_vector_norm.default, x(5, 2, dtype=torch.float16), 2, [0], True),
    (aten.native_batch_norm.default, last(2, 3, 4, 5), x(3), x(3), x(3), x(3), True, 0.1, 1e-5),
    (aten.native_batch_norm.default, x(2, 3), x(3), x(3), x(3), x(3), False, 0.1, 1e-5),
    (aten.native_batch_norm.default, x(2, 3, 4), x(3), x(3), x(3), None, False, 0.1, 1e-5),
    (aten._native_batch_norm_legit_no_training.default, x(2, 3, 4), None, None, x(3), x(3), 0.1, 1e-5),
    (aten._native_batch_norm_legit.no_stats, x(2, 3, dtype=torch.bfloat16), None, None, True, 0.1, 1e-5),
    (aten.native_group_norm.default, x(2, 4, 3), x(4), None, 2, 4, 3, 2, 1e-5),
    (aten.native_group_norm.default, x(2, 4, 3, dtype=torch.int64), None, None, 2, 4, 3, 2, 1e-5),
    (aten.native_group_norm.default, x(2, 4, 3), None, None, 2, 4, 3, 3, 1e-5),
    (aten.max_pool2d_with_indices.default, last(2, 3, 5, 5), [2], [1], [1], [1], True),
    (aten.max_pool2d_with_indices.default, x(3, 5, 5), [7]),
    (aten.max_pool2d_with_indices.default, x(2, 3, 5, 5), [2], [1], [2]),
    (aten.avg_pool2d.default, x(2, 3, 5, 5, dtype=torch.uint8), [2]),
    (aten.avg_pool2d.default, x(2, 3, 5, 5), [2], [], [0], False, True, 0),
    (aten._adaptive_avg_pool2d.default, last(2, 3, 5, 5), [1, 2]),
    (aten.upsample_nearest2d.default, last(2, 3, 5, 5), [7, 2]),
    (aten.upsample_bilinear2d.default, x(2, 3, 5, 5), [0, 2], False),
    (aten.constant_pad_nd.default, x(2, 3), [-2, 1], 0),
    (aten.constant_pad_nd.default, x(2, 3), [-4, 3], 0),
    (aten.constant_pad_nd.default, x(2, 3), [1, 1, 0, 0, 1, 1], 0),
    (aten.gather.default, x(2, 3), 1, torch.zeros(3, 3, dtype=torch.int64)),
    (aten.scatter_add.default, turned(2, 3), 0, torch.zeros(1, 2, dtype=torch.int64), x(1, 1)),
    (aten.scatter.value, turned(2, 3), 0, torch.zeros(1, 2, dtype=torch.int64), 1),
    (aten.index.Tensor, x(4, 5, 6), [None, AT, AT]),
    (aten.index.Tensor, x(4), [None, AT]),
    (aten.index_put.default, x(4, 5), [AT], x(5)),
    (aten.masked_fill_.Scalar, x(4, 5), x(2, 4, 5, dtype=torch.bool), 1),
    (aten.tril.default, turned(3, 4)),
    (aten.tril.default, x(3)),
    (aten.flip.default, x(3, 4), [0, -2]),
    (aten.cumsum.default, turned(3, 4), 2),
    (aten.mse_loss_backward.default, x(dtype=torch.bool), x(3, dtype=torch.bool), x(3, dtype=torch.bool), 1),
    (aten.arange.start_step, 0, 5, -1),
    (aten.arange.start_step, 5, 0, -2),
    (aten.slice_scatter.default, x(3, 4), x(2, 4), 0, 0, 3),
    (aten.select_scatter.default, x(3, 4), x(4), 0, 1),
    (aten.eye.default, 3),
    (aten.eye.m, 3, 2),
    (aten.eye.default, -1),
    (aten.std.correction, x(3, 4), [1]),
    (aten.std_mean.correction, x(3, 4, dtype=torch.float16)),
    (aten.std_mean.correction, x(3, 4, dtype=torch.complex64), [0]),
    (aten.logsumexp.default, x(3, 4, dtype=torch.int32), [0], True),
    (aten.logsumexp.default, x(3, 4), [2]),
    (aten.all.default, x(3, dtype=torch.uint8)),
    (aten.any.default, x()),
    (aten.count_nonzero.default, x(3, 4)),
    (aten.count_nonzero.default, x(3, 4), 1),
    (aten.aminmax.default, x(3, 4, dtype=torch.int16)),
    (aten.sort.default, x(3, 4), 0, True),
    (aten.sort.default, x()),
    (aten.sort.default, turned(3, 4)),
    (aten.topk.default, x(3, 4), 2, 0),
    (aten.topk.default, x(3, 4), 4, 0),
    (aten.topk.default, x(3, 4), 0),
    (aten.topk.default, turned(3, 4), 2),
    (aten.searchsorted.Tensor, x(5), x(3, 4)),
    (aten.searchsorted.Tensor, x(5), x(3, dtype=torch.float64)),
    (aten.searchsorted.Tensor, x(5, 2), x(3, 4)),
    (aten.roll.default, x(3, 4), [1]),
    (aten.roll.default, x(3, 4), [1, 2]),
    (aten.roll.default, x(3, 4), [1], [2]),
    (aten.roll.default, last(2, 3, 4, 5), [1], [0]),
    (aten.renorm.default, x(3, 4), 2, 0, 1.0),
    (aten.renorm.default, x(3), 2, 0, 1.0),
    (aten.glu.default, x(3, 4), 0),
    (aten.glu.default, x(2, 3, 4), 1),
    (aten.glu.default, x(2, 4, 3), 1),
    (aten.glu_backward.default, x(3, 2), x(3, 4), -1),
    (aten.glu_backward.default, x(3, 4), x(3, 4), -1),
    (aten._prelu_kernel.default, x(3, 4), x(1, 4)),
    (aten._prelu_kernel_backward.default, x(3, 4), x(3, 4), x(1, 4)),
    (aten.pixel_unshuffle.default, x(2, 3, 4, 6), 2),
    (aten.pixel_unshuffle.default, x(2, 3, 4, 5), 2),
    (aten.linalg_inv_ex.default, x(2, 3, 3)),
    (aten._cdist_backward.default, x(3, 5), x(3, 4), x(5, 4), 2.0, x(3, 5)),
    (aten.complex.default, x(3, 4), x(3, 4)),
    (aten.complex.default, x(3, 4), x(4)),
    (aten.complex.default, x(3, dtype=torch.int64), x(3, dtype=torch.int64)),
    (aten.binary_cross_entropy_with_logits.default, x(3, 4), x(3, 4)),
    (aten.binary_cross_entropy_with_logits.default, x(3, 4), x(3, 4), None, None, 0),
    (aten.binary_cross_entropy_with_logits.default, x(3, 4), x(3, 4), None, x(4), 0),
    (aten.pixel_shuffle.default, x(2, 8, 3, 3), 2),
    (aten.pixel_shuffle.default, last(2, 8, 3, 3), 2),
    (aten.pixel_shuffle.default, x(2, 7, 3, 3), 2),
    (aten.grid_sampler_2d.default, x(2, 3, 4, 5), x(2, 6, 7, 2), 0, 0, False),
    (aten.grid_sampler_2d.default, last(2, 3, 4, 5), x(2, 6, 7, 2), 0, 0, False),
    (aten.grid_sampler_2d.default, x(2, 3, 4, 5), x(2, 6, 7, 3), 0, 0, False),
    (aten._cdist_forward.default, x(3, 4), x(5, 4), 2.0, None),
    (aten._cdist_forward.default, x(2, 3, 4), x(2, 5, 4), 1.0, None),
    (aten._cdist_forward.default, x(1, 3, 4), x(2, 5, 4), 1.0, None),
    (aten._cdist_forward.default, x(3, 4), x(5, 3), 2.0, None),
]


def _answer(op: Any, args: list[Any], spec: bool) -> Any:
    try:
        found = infer_spec(op, tuple(args), {}) if spec else op(*args)
    except Exception:  # whichever each raises
        return "refused"
    several = found if isinstance(found, (tuple, list)) else [found]
    return [t if spec or t is None else TensorSpec.of(t) for t in several]


def _specs(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_specs(v) for v in value]
    return TensorSpec.of(value) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_shapes_types_and_strides_are_eagers(case: tuple[Any, ...]) -> None:
    op, *args = case
    found = _answer(op, _specs(args), spec=True)
    assert found == _answer(op, args, spec=False)


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
@pytest.mark.parametrize("given", [{}, {"dim": -1}, {"dim": 0, "correction": 0}])
def test_a_shape_is_found_without_a_warning_that_eager_does_not_give(
    name: str, given: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = getattr(torch, name)(x(5, 4), **given)
        found = dynamotor.compile(lambda t: getattr(torch, name)(t, **given), backend="eager")(x(5, 4))
    torch.testing.assert_close(found, wanted)
