"""A program that copies an input and multiplies with the copy may have the input written before the backward
runs: eager's backward reads the copy. A compiled one read the input, and PyTorch refused. So with results that equal
values which the backward reads: the caller may write into them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import dynamotor

pytestmark = pytest.mark.regression

Copy = Callable[[torch.Tensor], torch.Tensor]
COPIES: dict[str, Copy] = {
    "clone": lambda x: x.clone(),
    "clone_further": lambda x: x.clone() + 1,
    "clone_detached": lambda x: x.detach().clone(memory_format=torch.contiguous_format),
    "clone_view": lambda x: x.view(-1, 2).clone().view(x.shape),
    "to": lambda x: x.to(x.dtype, copy=True),
}


@pytest.mark.parametrize("name", COPIES)
def test_an_input_is_written_behind_its_copy(name: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (COPIES[name](x) * w).sum()

    w = torch.randn(4, requires_grad=True)
    for function in (program, dynamotor.compile(program, backend="aot_eager")):
        for rows in (2, 3):
            x = torch.arange(4.0 * rows).view(rows, 4)
            loss, wanted = function(x, w), COPIES[name](x).sum(0)
            x.zero_()
            torch.testing.assert_close(torch.autograd.grad(loss, w)[0], wanted)


def _normalize(u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.normalize(w * u, dim=0, out=u)


def _multiply(u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mul(u, 2, out=u)


def _concatenate(u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cat([w[2:], w[:2]], out=u)


def _cast(u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mul(u.double(), w, out=u)


def _grow(u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mul(w, w, out=torch.empty(0)) + u


@pytest.mark.parametrize("write", [_normalize, _multiply, _concatenate, _cast, _grow])
def test_what_out_wrote_and_was_copied(write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """`out=` of an input (the buffers of spectral norm), twice before one backward."""
    results = []
    for compiles in (False, True):
        u, w = torch.arange(1.0, 5.0), torch.arange(2.0, 6.0).requires_grad_()

        def program(w: torch.Tensor, u: torch.Tensor = u) -> torch.Tensor:
            with torch.no_grad():
                made = write(u, w).clone()
            return (made * w).sum()

        function = dynamotor.compile(program, backend="aot_eager") if compiles else program
        results.append((*torch.autograd.grad(function(w) + function(w), w), u))
    torch.testing.assert_close(*results)


def test_out_of_the_results_own_size_and_type_stays_in_the_graph() -> None:
    u = torch.ones(3)
    dynamotor.counters.clear()
    function = dynamotor.compile(lambda u: torch.add(u, 1, out=u) * 2, backend="aot_eager")
    torch.testing.assert_close(function(u), torch.full((3,), 4.0))
    assert not dynamotor.counters["fallback"]
    torch.testing.assert_close(u, torch.full((3,), 2.0))


def test_out_that_draws_draws_what_eager_draws() -> None:
    def program(u: torch.Tensor) -> torch.Tensor:
        return torch.rand(3, out=u) + torch.randn(3)

    results = []
    options = {"fallback_random": True}
    for function in (program, dynamotor.compile(program, backend="aot_eager", options=options)):
        torch.manual_seed(0)
        results.append(function(torch.zeros(3)))
    torch.testing.assert_close(*results)


def test_a_critic_with_a_spectral_norm_sees_two_batches() -> None:
    """Real and fake, then one backward, as adversarial training has it."""
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        critic = nn.utils.spectral_norm(nn.Linear(3, 2)).double()
        function = dynamotor.compile(critic, backend="aot_eager") if compiles else critic
        x = torch.randn(4, 3, dtype=torch.float64)
        (function(x).sum() + function(x * 2).square().sum()).backward()
        results.append(([p.grad for p in critic.parameters()], list(critic.buffers())))
    torch.testing.assert_close(*results)


def _shared(
    x: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    both = x.exp() * 2
    return copy(both), both.sin()


RESULTS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "equal": lambda x: ((x * 2).sin(), (x * 2).sin().sin()),
    "detached": lambda x: ((x * 2).exp().detach(), (x * 2).exp().sin()),
    "zeros": lambda x: (torch.zeros_like(x), x.softmax(-1).topk(1)[0]),
    "made in the gradient": lambda x: (torch.zeros(4, 3), x.max(-1)[0]),
    "positions": lambda x: (torch.arange(3), x.gather(1, torch.arange(3).expand(4, 3))),
    "one of two": lambda x: (x.sort(-1)[1], x.sort(-1)[0]),
    "mask": lambda x: (torch.ones(3, 3).tril(), x @ torch.ones(3, 3).tril()),
    "clone": lambda x: _shared(x, torch.clone),
    "clone of an equal one": lambda x: ((x * 2).exp().clone(), (x * 2).exp().sin()),
    "copied to": lambda x: _shared(x, lambda y: torch.zeros(4, 3).copy_(y)),
    "cast": lambda x: _shared(x, lambda y: y.to(y.dtype, copy=True)),
}


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_equals_a_saved_value_is_written(name: str, backend: str) -> None:
    compiled = dynamotor.compile(RESULTS[name], backend=backend)
    for by_numpy in (True, False):
        gradients = []
        for function in (RESULTS[name], compiled):
            x = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
            first, second = function(x)
            if by_numpy:  # nothing counts such a write
                first.detach().numpy()[...] = first.detach().numpy()[::-1] + 1
            else:
                first.detach().mul_(3)
            gradients += torch.autograd.grad(second.sum(), x)
        torch.testing.assert_close(gradients[1], gradients[0])


def test_experts_add_to_a_result_between_compiled_parts() -> None:
    """The gradient of `topk` makes zeros like those that the program made, and adds to."""
    experts, gate = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)]), nn.Linear(3, 3)

    def program(x: torch.Tensor) -> torch.Tensor:
        weights, chosen = gate(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out

    compiled = dynamotor.compile(program, backend="aot_eager")
    for rows in (4, 6):
        x = torch.randn(rows, 3)
        gradients = [torch.autograd.grad(call(x).sum(), gate.weight) for call in (program, compiled)]
        torch.testing.assert_close(gradients[1], gradients[0])
