"""Correct kernels pass the verifier: parts of joined tensors that no loop reads."""

import pytest
import torch
import torch.nn.functional as F

import dynamotor


def _pad_of_a_row(x):
    values, _ = x.cummin(1)
    return F.pad(values, (0, 1, 2, 0), value=1.0)[0].add_(1)


def _write_behind_a_negative_pad(x):
    y = F.pad(x, (-1, 1))
    y[..., -1] *= 2
    return y


def _join_of_a_join(x, y):
    joined = torch.hstack([x.cummin(2)[0], y])
    return torch.cat([joined.flatten(), y.sum().flatten()])


def _join_with_its_transpose(x, y):
    return torch.cat([x.flatten(), x.T.flatten()]), F.mse_loss(x, y)


def _end_of_a_join(x, y):
    return torch.cat([x, y], 0)[-2:], x.diff(dim=-1)


# Parts of these are behind conditions that never hold, or that say something of each loop.
CONDITIONS = {
    "pad": (_pad_of_a_row, (2, 2)),
    "pad that cuts": (_write_behind_a_negative_pad, (2,)),
    "a row of a join": (lambda x: torch.vstack([x, x]).index_select(0, torch.tensor([0])), (2, 2)),
    "a join rolled": (lambda x, y: torch.vstack([x, y]).roll(1, -2), (2, 2), (2,)),
    "a join of a join": (_join_of_a_join, (1, 8, 2), (1, 8, 2)),
    "a join with its transpose": (_join_with_its_transpose, (8, 1, 8), ()),
}


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_that_say_where_a_part_is_read(name):
    function, *shapes = CONDITIONS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    with dynamotor.config.patch(verify=True):
        got = dynamotor.compile(function)(*inputs)
    torch.testing.assert_close(got, function(*inputs))


@pytest.mark.regression
def test_a_part_that_is_never_read_where_its_loop_runs():
    x, y = torch.randn(2, requires_grad=True), torch.randn(2)
    torch.autograd.backward(dynamotor.compile(_end_of_a_join)(x, y), [torch.ones(2), torch.ones(1)])
    assert x.grad.tolist() == [-1.0, 1.0]
