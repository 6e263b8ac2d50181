"""Programs that campaigns of the fuzzers found and cut down: refused as wrong although they were right, or wrong."""

import pytest
import torch
import torch.nn.functional as F

import dynamotor

INF = float("inf")


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


# Parts of these lie behind conditions that never hold, or that say something of each loop.
CONDITIONS = {
    "pad": (_pad_of_a_row, (2, 2)),
    "pad that cuts": (_write_behind_a_negative_pad, (2,)),
    "a row of a join": (lambda x: torch.vstack([x, x]).index_select(0, torch.tensor([0])), (2, 2)),
    "a join rolled": (lambda x, y: torch.vstack([x, y]).roll(1, -2), (2, 2), (2,)),
    "a join of a join": (_join_of_a_join, (1, 8, 2), (1, 8, 2)),
    "a join with its transpose": (_join_with_its_transpose, (8, 1, 8), ()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_that_say_where_a_part_is_read(name):
    function, *shapes = CONDITIONS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    with dynamotor.config.patch(verify=True):
        got = dynamotor.compile(function)(*inputs)
    torch.testing.assert_close(got, function(*inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_gelu_of_large_negative_halves_is_zero(dtype, isa):
    x = torch.tensor([-65504.0, -3e4, -300.0, -7.0, 65504.0] * 7).to(dtype)
    with dynamotor.config.patch(isa=isa):
        got = dynamotor.compile(F.gelu)(x)
    torch.testing.assert_close(got, F.gelu(x))


@pytest.mark.filterwarnings("ignore")
def test_no_gradient_arrives_at_a_loss_of_infinities():
    x, y = torch.tensor([[INF, 1.0], [2.0, 3.0]], requires_grad=True), torch.randn(2, 2, requires_grad=True)

    def both(x, y):
        return F.mse_loss(y.sum(1), x), torch.cat([y, y[..., :1]], -1)

    want, = torch.autograd.grad(both(x, y)[1].sum(), y)
    got, = torch.autograd.grad(dynamotor.compile(both)(x, y)[1].sum(), y)
    torch.testing.assert_close(got, want)
