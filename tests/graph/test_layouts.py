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


LAYOUTS = [
    ((2, 1, 2, 1), (8, 3, 4, 2)),
    ((2, 1, 2, 2), (8, 1, 4, 2)),
    ((2, 1, 2, 2), (4, 9, 2, 2)),
    ((2, 2, 1, 1), (2, 1, 2, 2)),
    ((2, 2), (1, 2)),
    ((1, 2), (1, 1)),
]


@pytest.mark.regression
def test_strides_of_ops_that_write_at_positions_or_copy():
    """Strides of size-1 dimensions, too: `stack` lays its result out by them."""
    aten, at, wrong = torch.ops.aten, torch.zeros(1, dtype=torch.int64), []
    for shape, stride in LAYOUTS:
        x = torch.zeros(40).as_strided(shape, stride)
        part, mask, where = x[..., :1], x > 0, torch.zeros(shape, dtype=torch.int64)[..., :1]
        for op, args in [
            (aten.index_add.default, (-1, at, part)),
            (aten.index_copy.default, (-1, at, part)),
            (aten.index_reduce.default, (-1, at, part, "prod")),
            (aten.index_fill.int_Scalar, (-1, at, 1.0)),
            (aten.index_fill.int_Tensor, (-1, at, torch.ones(()))),
            (aten.index_put.default, ([at], x[:1])),
            (aten.scatter.src, (-1, where, part)),
            (aten.scatter.value, (-1, where, 1.0)),
            (aten.scatter_add.default, (-1, where, part)),
            (aten.scatter_reduce.two, (-1, where, part, "sum")),
            (aten.slice_scatter.default, (part, -1, 0, 1)),
            (aten.select_scatter.default, (x.select(-1, 0), -1, 0)),
            (aten.masked_fill.Scalar, (mask, 1.0)),
            (aten.masked_scatter.default, (mask, x.flatten())),
            (aten.put.default, (where, part)),
            (aten.fill.Scalar, (1.0,)),
            (aten.clone.default, ()),
            (aten.flip.default, ([0],)),
            (aten.roll.default, ([1], [0])),
            (aten.tril.default, ()),
            (aten.cumsum.default, (-1,)),
            (aten.renorm.default, (2.0, 0, 1.0)),
        ]:
            specs = _specs(x, *[[*_specs(at)] if type(a) is list and a[0] is at else a for a in args])
            found = infer_spec(op, specs, {})
            if tuple(found.stride) != op(x, *args).stride():
                wrong.append((str(op), shape, stride, found.stride))
    assert not wrong


_NUMBER_FIRST = [
    torch.ops.aten.remainder.Scalar_Tensor,
    torch.ops.aten.bitwise_and.Scalar_Tensor,
    torch.ops.aten.bitwise_left_shift.Scalar_Tensor,
    torch.ops.aten.rsub.Scalar,
    torch.ops.aten.pow.Scalar,
]


@pytest.mark.regression
@pytest.mark.parametrize("op", _NUMBER_FIRST, ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 3, 1, 1), (1, 3, 2, 2), (1, 1, 2, 3)])
def test_strides_of_ops_whose_first_operand_is_a_number(op, shape):
    x = torch.ones(shape, dtype=torch.int64).to(memory_format=torch.channels_last)
    args = (x, 3) if op is torch.ops.aten.rsub.Scalar else (3, x)
    assert infer_spec(op, _specs(*args), {}).stride == op(*args).stride()
