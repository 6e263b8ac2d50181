"""Solvers raise or not as the data are: they stay in the graph, and what eager raises is raised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

LA = torch.linalg
EYE = torch.eye(3, dtype=torch.float64)
SOLVERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "inv": lambda a, b: LA.inv(a) @ b,
    "solve": lambda a, b: LA.solve(a + EYE * 0.0, b) * 2,
    "cholesky": lambda a, b: LA.cholesky(a @ a.mT) @ b,
    "power": lambda a, b: LA.matrix_power(a, -2) @ b,
    "lu": lambda a, b: LA.lu_factor(a)[0] * b.sum(),
}


def caught(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What programs do where a matrix is singular."""
    try:
        return LA.inv(a) @ b
    except LA.LinAlgError:
        return LA.pinv(a) @ b + 1


def unused(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Not the result is read, but whether it is there."""
    LA.inv(a)
    return b * 2


def written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An input is written before the solver may raise."""
    b.mul_(2)
    try:
        return LA.inv(a) @ b
    except LA.LinAlgError:
        return b + 1


def drawn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Numbers are drawn before."""
    try:
        return LA.inv(a) @ torch.rand_like(b)
    except LA.LinAlgError:
        return torch.rand_like(b) * 3


def matrices() -> list[torch.Tensor]:
    """Regular, singular, regular again."""
    torch.manual_seed(1)
    a = torch.randn(3, 3, dtype=torch.float64) + 2 * EYE
    return [a, torch.zeros(3, 3, dtype=torch.float64), a.mT.contiguous()]


def answers(fn: Callable[..., torch.Tensor], needs_grad: bool) -> list[object]:
    """Results of three calls, with gradients, writes and errors."""
    found: list[object] = []
    for n, a in enumerate(matrices()):
        torch.manual_seed(n)
        a, b = a.requires_grad_(needs_grad), torch.randn(3, 2, dtype=torch.float64)
        try:
            out = fn(a, b)
            found += [out.detach(), b]
            if out.requires_grad:
                found.append(torch.autograd.grad(out.square().sum(), a)[0])
        except RuntimeError as error:
            found += [str(error), b]
        found.append(torch.rand(1))
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", [*SOLVERS, "caught", "unused", "written", "drawn"])
def test_a_solver(name: str, needs_grad: bool, backend: str) -> None:
    dynamotor.reset()
    fn = SOLVERS.get(name) or globals()[name]
    wanted = answers(fn, needs_grad)
    with dynamotor.config.patch(fallback_random=True):
        found = answers(dynamotor.compile(fn, backend=backend), needs_grad)
    assert len(found) == len(wanted)
    for mine, its in zip(found, wanted, strict=True):
        assert mine == its if isinstance(its, str) else not torch.testing.assert_close(mine, its)
    if name in SOLVERS:
        assert counters["capture"]["graphs"] == 1 and not counters["breaks"]
