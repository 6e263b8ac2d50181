"""Gradients of decomposed operations at infinities."""

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
