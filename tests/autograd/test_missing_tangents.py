"""Outputs that the loss does not see: their gradients are left out of the backward, not carried along as
zeros.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dynamotor
from dynamotor.base.events import collect


class Speaker(nn.Module):
    """Loss beside logits and hidden states, as language models give them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.second, self.side = nn.Linear(8, 11), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.nn.functional.gelu(self.norm(self.first(x)))
        logits = self.second(hidden)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        return loss, logits, hidden.transpose(0, 1) * 2, torch.sigmoid(self.side(hidden)), -hidden


LOSSES = {
    "loss": lambda out: out[0],
    "logits": lambda out: out[1].square().sum(),
    "loss and hidden": lambda out: out[0] + out[2].cos().sum(),
    "side and negative": lambda out: out[3].sum() + out[4].exp().sum(),
    "all": lambda out: sum(o.sum() for o in out),
}


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_eagers_whatever_the_loss_sees(name: str, backend: str) -> None:
    torch.manual_seed(0)
    model = Speaker().double()
    x, labels = torch.randn(6, 8, dtype=torch.float64, requires_grad=True), torch.randint(0, 11, (6,))
    compiled = dynamotor.compile(model, backend=backend)
    inputs = [x, *model.parameters()]
    for _ in range(2):
        wanted = torch.autograd.grad(LOSSES[name](model(x, labels)), inputs, allow_unused=True)
        found = torch.autograd.grad(LOSSES[name](compiled(x, labels)), inputs, allow_unused=True)
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)


def test_one_forward_serves_losses_of_several_kinds() -> None:
    torch.manual_seed(0)
    model = Speaker().double()
    compiled = dynamotor.compile(model)
    x, labels = torch.randn(6, 8, dtype=torch.float64), torch.randint(0, 11, (6,))
    for name in ("loss", "side and negative", "loss", "all"):
        model.zero_grad()
        LOSSES[name](model(x, labels)).backward()
        wanted = [p.grad for p in model.parameters()]
        model.zero_grad()
        LOSSES[name](compiled(x, labels)).backward()
        for p, b in zip(model.parameters(), wanted, strict=True):
            assert (p.grad is None) == (b is None)
            if b is not None:
                torch.testing.assert_close(p.grad, b)


def test_nothing_as_large_as_the_logits_is_filled_or_added_for_a_loss_alone() -> None:
    model, x, labels = Speaker(), torch.randn(64, 8), torch.randint(0, 11, (64,))
    with collect("aten_graph") as graphs:
        dynamotor.compile(model, backend="aot_eager")(x, labels)[0].backward()
    (backward,) = [e.data["graph"] for e in graphs if e.data["stage"] == "backward"]
    names = [str(node.target) for node in backward.graph.nodes if node.op == "call_function"]
    assert not any("sigmoid" in n or "full" in n or "transpose" in n for n in names)
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    assert sum(node.meta["val"].shape == () for node in placeholders if "tangent" in node.name) <= 1


def test_an_infinite_value_behind_an_unseen_output_does_no_harm() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(), (
            1 / x
        ).log()  # the second one's derivative at zero is infinite; zero times that would be NaN

    x = torch.tensor([0.0, 1.0], requires_grad=True)
    dynamotor.compile(f)(x)[0].backward()
    assert torch.equal(x.grad, torch.ones(2))


LINEAR = {
    "written": lambda x: x.index_put((torch.tensor([0, -1]),), torch.ones((), dtype=torch.float64)),
    "repeated and normed": lambda x: F.normalize(x.repeat(2, 1), dim=1),
    "where": lambda x: torch.where(x > 0, x * x, 0.0),
    "matrix times vector": lambda x: x @ x[0],
    "cumulative product": lambda x: x.cumprod(0),
    "cumulative sum of exponentials": lambda x: x.logcumsumexp(1),
    "cross": lambda x: torch.linalg.cross(x, x.flip(0)),
    "xlogy": lambda x: torch.xlogy(x, x.abs() + 1),
    "exponential of a matrix": lambda x: torch.matrix_exp(x),
    "factors": lambda x: torch.linalg.qr(x)[1],
    "chosen rows": lambda x: x[torch.tensor([2, 0, 0])].flip(1).roll(1),
    "spectrum": lambda x: torch.fft.rfft(x).abs(),
}


@pytest.mark.parametrize("op", LINEAR.values(), ids=list(LINEAR))
def test_a_nan_that_the_loss_does_not_see_stays_where_it_is(op) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, op(x)

    x = torch.randn(3, 3, dtype=torch.float64)
    x[0, 0] = float("nan")
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(dynamotor.compile(f, backend="aot_eager")(x)[0].sum(), x)
    assert gradient.eq(2).all()


def test_what_reads_gradients_that_arrive_too_is_calculated() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = (x * 3).sin().split(2)
        return a, b, c

    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    compiled = dynamotor.compile(f)
    for n in range(3):
        (want,) = torch.autograd.grad(f(x)[n].sum(), x)
        (got,) = torch.autograd.grad(compiled(x)[n].sum(), x)
        torch.testing.assert_close(got, want)


def test_a_gradient_through_a_step_is_zeros_and_not_none() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.floor(), x.prod(-1)

    x = torch.rand(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(dynamotor.compile(f)(x)[0].sum(), x, allow_unused=True)
    assert gradient is not None and not gradient.any()
