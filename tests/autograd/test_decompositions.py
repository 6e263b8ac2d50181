"""Composite ops that become smaller ones: values, and gradients at infinities."""

import pytest
import torch
import torch.nn.functional as F

import dynamotor

INF = float("inf")


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore")
def test_no_gradient_arrives_at_a_loss_of_infinities():
    x, y = torch.tensor([[INF, 1.0], [2.0, 3.0]], requires_grad=True), torch.randn(2, 2, requires_grad=True)

    def both(x, y):
        return F.mse_loss(y.sum(1), x), torch.cat([y, y[..., :1]], -1)

    (want,) = torch.autograd.grad(both(x, y)[1].sum(), y)
    (got,) = torch.autograd.grad(dynamotor.compile(both)(x, y)[1].sum(), y)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("tests", [[3], [3, 5], [[1, 2], [7, 8]], [2.0, float("nan")], 4, list(range(9))])
def test_membership_among_few_values_is_comparisons(tests, invert):
    tests = torch.tensor(tests)
    elements = [torch.randint(0, 9, (3, 4)), torch.tensor([1.5, 2.0, float("nan")]), torch.tensor(3)]

    def member(x):
        return torch.isin(x, tests, invert=invert), torch.isin(x[..., None], tests).any()

    for x in elements:
        got = dynamotor.compile(member)(x)
        assert all(map(torch.equal, got, member(x)))
    assert ("isin" in str(dynamotor.explain(member)(elements[0]))) == (tests.numel() > 8)


@pytest.mark.parametrize(
    "place",
    [lambda m: m, lambda m: (slice(None), m[0]), lambda m: (m[:, 0], slice(None)), lambda m: (m, None)],
    ids=["whole", "columns", "rows", "another dimension"],
)
@pytest.mark.parametrize("number", [0.0, torch.tensor(2.5), torch.tensor([3.0])], ids=["plain", "0-d", "1-d"])
def test_a_number_is_put_where_a_mask_says_without_counting_places(place, number):
    x, mask = torch.randn(4, 6, requires_grad=True), torch.rand(4, 6) > 0.5

    def put(x, mask):
        y = x.t().contiguous().t()
        y = y[..., None] * 1 if place(mask)[-1:] == (None,) else y * 1
        y[place(mask)] = number
        return y

    want, got = put(x, mask), dynamotor.compile(put, fullgraph=True)(x, mask)
    assert torch.equal(want, got) and want.stride() == got.stride()
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (want, got)]
    assert torch.equal(*grads)
    assert "index_put" not in str(dynamotor.explain(put)(x, mask))


def test_a_number_is_put_where_the_tensor_itself_says():
    def put(x):
        y = x > 0
        y[y] = False
        return y

    x = torch.randn(8)
    assert torch.equal(dynamotor.compile(put)(x), put(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "x", [torch.randn(4, 5).t(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
)
def test_a_random_slope_outside_of_training_is_the_middle_one(x, dtype):
    def slope(x):
        return F.rrelu(x, 0.1, 0.3)

    one, other = (x.detach().clone().to(dtype).requires_grad_() for _ in range(2))
    want, got = slope(one), dynamotor.compile(slope)(other)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert got.stride() == want.stride()
    arriving = torch.randn(want.shape).to(dtype)
    want.backward(arriving)
    got.backward(arriving)
    torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=0)
    assert other.grad.stride() == one.grad.stride()
    assert "DM236" not in str(dynamotor.explain(slope)(other))
