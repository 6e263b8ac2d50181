"""Trial runs draw from copies of the generators: other threads' random numbers stay a sequence of their own."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.base.config import config
from dynamotor.graph import kernel_checks
from dynamotor.graph.private_draws import NotPrivate, PrivateDraws

aten = torch.ops.aten
X = torch.linspace(0.1, 0.9, 12).view(3, 4)
PROGRAMS = {
    "rand": lambda: torch.rand(3),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(2, 9, (4,)),
    "randint_like of a tensor": lambda: torch.randint_like(X, torch.tensor(9)),
    "randperm": lambda: torch.randperm(9),
    "bernoulli": lambda: torch.bernoulli(X),
    "normal_": lambda: torch.empty(4).normal_(1, 2),
    "multinomial": lambda: torch.multinomial(X, 2),
    "dropout": lambda: F.dropout(X, 0.5),
    "native_dropout": lambda: torch.native_dropout(X, 0.3, True)[0],
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.5, training=True),
    "rrelu": lambda: F.rrelu(-X, training=True),
    "poisson": lambda: torch.poisson(X),
    "gamma": lambda: torch._standard_gamma(X),
    "attention": lambda: F.scaled_dot_product_attention(X[None], X[None], X[None], dropout_p=0.5),
    "lstm": lambda: torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)(X)[0],
    "new_seed": lambda: torch.ops.dynamotor.new_seed(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_private_draws_are_those_of_eager(name):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with PrivateDraws() as draws:
        private = PROGRAMS[name]()
    assert torch.equal(torch.get_rng_state(), before)
    with PrivateDraws(draws.states):
        assert torch.equal(PROGRAMS[name](), private)
    assert torch.equal(PROGRAMS[name](), private)
    assert draws.has_drawn


def test_a_generator_of_the_program_stays_in_use():
    with PrivateDraws() as draws:
        found = torch.rand(3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(found, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert not draws.has_drawn


def test_an_op_without_a_form_that_takes_a_generator_is_refused():
    @torch.library.custom_op(
        "private_draws::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
    )
    def noise(x: torch.Tensor, p: float) -> torch.Tensor:
        return x + p * torch.rand(x.shape)

    with PrivateDraws(), pytest.raises(NotPrivate):
        noise(X, 0.5)


def test_kernels_that_are_asked_draw_nothing_from_the_program():
    calls = [
        (aten.bernoulli.p, (X, 0.5)),
        (aten.randn_like.default, (X,)),
        (aten.native_dropout.default, (X, 0.5, True)),
    ]

    def ask():
        for _ in range(300):
            for func, args in calls:
                assert kernel_checks.run_kernel(func, args, {}) is None

    thread, found = threading.Thread(target=ask), []
    thread.start()
    while thread.is_alive():
        found += torch.rand(256, dtype=torch.float64).tolist()
    assert len(set(found)) == len(found)
    assert isinstance(kernel_checks.run_kernel(aten.bernoulli.p, (X, 2.0), {}), RuntimeError)


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_check_mode_sets_no_generator_back(backend, monkeypatch):
    """It runs each graph several times."""

    def program(x):
        return F.dropout(x, 0.5).sum() + torch.rand(3).sum()

    def refuse(state):
        raise AssertionError("a generator is set back")

    torch.manual_seed(5)
    program(X)
    advanced = torch.get_rng_state()
    torch.manual_seed(5)
    monkeypatch.setattr(torch, "set_rng_state", refuse)
    with config.patch(check=True, fallback_random=True):
        dynamotor.compile(program, backend=backend)(X)
    assert torch.equal(torch.get_rng_state(), advanced)
