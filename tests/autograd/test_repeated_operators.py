"""A second derivative runs the graph again, and does not call operators again whose Python reads or draws something:
it takes the results that they gave in the forward.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.autograd import grad

import dynamotor

STATE, LOG = {"k": 1.5}, [0]
library = torch.library.Library("repeated", "FRAGMENT")
library.define("raw(Tensor x) -> Tensor")
library.impl("raw", lambda x: x * STATE["k"], "CPU")
library.impl("raw", lambda x: torch.empty_like(x), "Meta")


def _note() -> float:
    return random.random()


@torch.library.custom_op("repeated::reads", mutates_args=())
def reads(x: torch.Tensor) -> torch.Tensor:
    return x * STATE["k"]


@torch.library.custom_op("repeated::draws", mutates_args=())
def draws(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + _note())


@torch.library.custom_op("repeated::two", mutates_args=())
def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * STATE["k"], x.cos() * STATE["k"]


@torch.library.custom_op("repeated::several", mutates_args=())
def several(x: torch.Tensor) -> list[torch.Tensor]:
    return [x * STATE["k"], x.cos() * STATE["k"]]


@torch.library.custom_op("repeated::writes", mutates_args=("x",))
def writes(x: torch.Tensor) -> torch.Tensor:
    x.mul_(STATE["k"])
    return x.sin()


for one in (reads, draws):
    one.register_fake(lambda x: torch.empty_like(x))
    one.register_autograd(lambda ctx, g: g.sin() * 1.5)
two.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
two.register_autograd(lambda ctx, g, h: g.sin() + h)
several.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x)])
writes.register_fake(lambda x: torch.empty_like(x))


def _writes_the_result(x: torch.Tensor) -> torch.Tensor:
    y = reads(x.sin())
    z = y * 2.0
    y.add_(1)
    return z * z * y.detach()


def _keeps_two(x: torch.Tensor) -> torch.Tensor:
    a, b = two(x)
    return a * a * b


def _without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = reads(x)
    return y * x**3 + torch.ops.repeated.raw(x.detach()) * x.exp()


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one": lambda x: reads(x.sin()) ** 2,
    "drawn": lambda x: draws(x.sin()) ** 2 * draws(x),
    "two results": _keeps_two,
    "a list": lambda x: several(x.detach())[1] * x**3,
    "written": _writes_the_result,
    "no gradient": _without_gradient,
    "writes": lambda x: writes(x.detach().clone()) * x**3,
}


def _derivatives(f: Callable[[torch.Tensor], torch.Tensor], n: int) -> list[torch.Tensor]:
    """Three derivatives; the state changes between them."""
    random.seed(3)
    found: list[torch.Tensor] = []
    for _ in range(2):
        STATE["k"] = 1.5
        x = torch.linspace(0.3, 1.2, n, dtype=torch.float64, requires_grad=True)
        last = f(x)
        for k in (3.0, 7.0, 11.0):
            found.append(last.detach())
            STATE["k"] = k
            (last,) = grad(last.sum(), x, create_graph=True)
        found += [last, torch.tensor(random.random(), dtype=torch.float64)]
    return found


@pytest.mark.parametrize(
    "name", ["one", *(pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS if name != "one")]
)
def test_a_second_derivative_takes_the_results_of_the_forward(name: str) -> None:
    want = _derivatives(PROGRAMS[name], 3)
    compiled = dynamotor.compile(PROGRAMS[name], backend="aot_eager")
    got = _derivatives(compiled, 3)
    torch.testing.assert_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_so_it_does_at_any_size_and_in_kernels(name: str) -> None:
    compiled = dynamotor.compile(PROGRAMS[name], dynamic=True)
    for n in (3, 5):
        torch.testing.assert_close(_derivatives(compiled, n), _derivatives(PROGRAMS[name], n))


def test_a_result_that_was_written_is_not_taken() -> None:
    """It is an output of the graph, and so the program's to write."""
    f = dynamotor.compile(lambda x: (y := reads(x.sin()), y**3), backend="aot_eager")
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    y, z = f(x)
    with torch.no_grad():
        y.detach().mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        grad(z.sum(), x, create_graph=True)


def test_results_are_freed_with_the_graph() -> None:
    f = dynamotor.compile(lambda x: (reads(x.sin()) ** 2).sum(), backend="aot_eager")
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss = f(x)
    (kept,) = [one for one, _ in loss.grad_fn.given.results]
    gone = weakref.ref(kept)
    del kept
    loss.backward()
    assert gone() is None
