"""Function transforms are decomposed by PyTorch's own functorch into the aten graph that is compiled."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from warned import text_of

import dynamotor
from dynamotor import counters


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


def many(net: torch.nn.Module, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Values and per-sample derivatives of a network, of a function that reads `w`, and of both nested."""
    params = dict(net.named_parameters())

    def loss(p: dict, row: torch.Tensor) -> torch.Tensor:
        return functional_call(net, p, (row,)).pow(2).sum()

    per_sample = vmap(grad(loss), in_dims=(None, 0))(params, x)
    total = sum(g.pow(2).flatten(1).sum(1) for g in per_sample.values())

    def f(row: torch.Tensor) -> torch.Tensor:
        return (row.sin() * w).softmax(-1)

    out, pull = vjp(f, x[0])
    pieces = [
        total.sum(),
        jacrev(f)(x[0]).pow(2).sum(),
        jacfwd(lambda row: f(row) * row)(x[1]).sum(),
        hessian(lambda row: f(row).pow(3).sum())(x[1]).abs().sum(),
        vmap(pull)(torch.eye(4, dtype=x.dtype))[0].cos().sum(),
        jvp(f, (x[2],), (x[1],))[1].pow(2).sum(),
        vmap(vmap(lambda a: a * 2 + 1))(x).sum(),
        out[0],
    ]
    return torch.stack(pieces)


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.slow
def test_values_and_gradients_are_those_of_eager(backend: str) -> None:
    net = _net()
    compiled = dynamotor.compile(many, backend=backend, fullgraph=True)
    counters.clear()
    for rows in (3, 5):
        torch.manual_seed(rows)
        x = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
        w = torch.randn(4, dtype=torch.float64, requires_grad=True)
        expected, got = many(net, x, w), compiled(net, x, w)
        torch.testing.assert_close(got, expected)
        wanted = [x, w, *net.parameters()]
        weights = torch.linspace(0.5, 2, 8, dtype=x.dtype)
        for mine, theirs in zip(
            torch.autograd.grad((got * weights).sum(), wanted, allow_unused=True),
            torch.autograd.grad((expected * weights).sum(), wanted, allow_unused=True),
            strict=True,
        ):
            if theirs is None:
                assert mine is None or not mine.any()
            else:
                torch.testing.assert_close(mine, theirs)
    assert not [code for code in counters["fallback"] if code.startswith("aot.")]


def test_a_random_function_draws_anew_for_each_row() -> None:
    compiled = dynamotor.compile(
        lambda x: vmap(lambda row: torch.nn.functional.dropout(row, 0.5), randomness="different")(x),
        fullgraph=True,
    )
    out = compiled(torch.ones(64, 64))
    assert set(out.unique().tolist()) == {0.0, 2.0} and not out[0].equal(out[1])


def test_an_error_in_a_transformed_function_prints_nothing(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        dynamotor.compile(lambda x: vmap(lambda row: torch.rand(3))(x))(torch.ones(2, 3))
    assert not text_of(recwarn)
