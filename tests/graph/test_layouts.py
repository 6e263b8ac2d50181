"""Layouts of results where sizes of one fit several memory formats."""

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.graph.shapes import infer_spec
from dynamotor.graph.spec import TensorSpec


def _specs(*args):
    return tuple([TensorSpec.of(a) if isinstance(a, torch.Tensor) else a for a in args])


def _strides(x):
    return [
        step for step, n in zip(x.stride() if isinstance(x, torch.Tensor) else x.stride, x.shape) if n > 1
    ]


@pytest.mark.regression
@pytest.mark.parametrize(
    "shape", [(1, 2, 2, 3), (2, 2, 1, 1), (2, 1, 2, 2), (1, 2, 1, 2), (2, 3, 2, 1), (1, 1, 2, 2)]
)
def test_strides_of_batch_norm_where_sizes_of_one_fit_two_formats(shape):
    aten, n = torch.ops.aten, torch.rand(shape[1])
    for order in [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3), (2, 3, 0, 1), (3, 2, 1, 0)]:
        x = torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
        args = (x, n, n, n, n, True, 0.1, 1e-5)
        out, mean, rstd = aten.native_batch_norm(*args)
        assert _strides(infer_spec(aten.native_batch_norm.default, _specs(*args), {})[0]) == _strides(out)
        for grad in (torch.randn_like(out), torch.randn(shape)):
            args = (grad, x, n, n, n, mean, rstd, True, 1e-5, [True] * 3)
            assert _strides(
                infer_spec(aten.native_batch_norm_backward.default, _specs(*args), {})[0]
            ) == _strides(aten.native_batch_norm_backward(*args)[0])


@pytest.mark.regression
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 3), (2, 2, 1), (2, 2, 3)])
def test_strides_of_a_convolution_in_one_dimension(shape):
    for x in (torch.randn(shape), torch.randn(shape[0], shape[2], shape[1]).mT):
        args = x, torch.randn(2, shape[1], 1), None, [1], [2], [2], False, [0], 1
        assert _strides(infer_spec(torch.ops.aten.convolution.default, _specs(*args), {})) == _strides(
            torch.ops.aten.convolution(*args)
        )


@pytest.mark.regression
def test_a_loss_of_each_pixel_is_row_major():
    x, y = torch.randn(2, 3, 5, 4), torch.zeros(2, 4, 5, dtype=torch.int64).mT
    got = dynamotor.compile(lambda x, y: F.cross_entropy(x, y, reduction="none"))(x, y)
    assert got.stride() == F.cross_entropy(x, y, reduction="none").stride()
