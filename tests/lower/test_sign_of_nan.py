"""Eager's sign has two comparisons: no number has the sign 0, and so has minus zero."""

from __future__ import annotations

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sign_and_the_gradient_of_abs_at_nan_and_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([float("nan"), -0.0, 0.0, 1.0, -2.0, float("inf")], dtype=dtype)
    found, wanted = dynamotor.compile(torch.sign)(x), torch.sign(x)
    assert torch.equal(found, wanted) and torch.equal(torch.signbit(found), torch.signbit(wanted))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    dynamotor.compile(torch.abs)(a).sum().backward()
    b.abs().sum().backward()
    assert torch.equal(a.grad, b.grad)


NAN = float("nan")
BEHIND_A_SIGN = {
    "product": lambda x, y: (x.log() * y).sgn(),
    "quotient": lambda x, y: (x / y.log()).sgn() + x,
    "join": lambda x, y: torch.cat([x.log(), y.exp()]).sgn(),
    "sum": lambda x, y: (x.unsqueeze(0) * y.log()).sgn().sum(0) * x,
    "views": lambda x, y: (x.log().view(4, 1) * y).sgn().sum(),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", BEHIND_A_SIGN)
def test_the_gradient_of_sgn_is_zero_beside_nan(name: str, dynamic: bool | None) -> None:
    f = BEHIND_A_SIGN[name]
    x = torch.tensor([-1.0, 2.0, 3.0, 0.0], requires_grad=True)
    y = torch.tensor([NAN, 0.0, -1.0, NAN], requires_grad=True)
    want = torch.autograd.grad(f(x, y).sum(), (x, y))
    got = torch.autograd.grad(dynamotor.compile(f, dynamic=dynamic)(x, y).sum(), (x, y))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def _three_results(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = x.log()
    w = z * y
    return w, w.sgn(), w.round() * z


def _a_column(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = torch.einsum("i,j->ij", x, y)
    return z, z.unbind(1)[0].sgn(), z.floor()


@pytest.mark.parametrize("f", [_three_results, _a_column])
def test_zeros_behind_an_op_without_slope_arrive_with_its_gradient_alone(f) -> None:
    """They stood in the backward as constants: NaN times zero came in, or was missing, whatever arrived."""
    given = torch.tensor([-1.0, 2.0, 0.0]), torch.tensor([0.0, NAN, 1.0])
    compiled = dynamotor.compile(f)
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        found = []
        for fn in (compiled, f):
            inputs = [t.clone().requires_grad_() for t in given]
            results = fn(*inputs)
            roots = [results[n] for n in chosen]
            found.append(torch.autograd.grad(roots, inputs, [torch.ones_like(r) for r in roots]))
        torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
