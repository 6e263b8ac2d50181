"""The rest of a frame after a break serves equal modules with one graph; what differs between them is seen."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor.base.events import counters


class Block(nn.Module):
    """Breaks before its computation."""

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(n, n), nn.BatchNorm1d(n), nn.Linear(n, n)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x + self.second(self.norm(self.first(x)).relu()) * self.scale


class Model(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def nothing(model: Model) -> None:
    """All blocks are alike."""


def hooked(model: Model) -> None:
    model.blocks[2].norm.register_forward_hook(lambda module, args, out: out * 2)


def in_evaluation(model: Model) -> None:
    model.blocks[1].norm.eval()


def frozen(model: Model) -> None:
    model.blocks[2].second.weight.requires_grad_(False)


def scaled(model: Model) -> None:
    model.blocks[3].scale = 0.5


def tied(model: Model) -> None:
    model.blocks[2].second.weight = model.blocks[2].first.weight


def tied_across(model: Model) -> None:
    model.blocks[2].second.weight = model.blocks[0].first.weight


def shared_buffers(model: Model) -> None:
    model.blocks[2].norm.running_mean = model.blocks[2].norm.running_var


def the_same_block(model: Model) -> None:
    model.blocks[3] = model.blocks[0]


def transposed(model: Model) -> None:
    model.blocks[1].first.weight = nn.Parameter(model.blocks[1].first.weight.detach().t())


def without_bias(model: Model) -> None:
    model.blocks[2].first.bias = None


def gradient_hook(model: Model) -> None:
    model.blocks[2].first.weight.register_hook(lambda grad: grad * 3)


def a_view_of_another(model: Model) -> None:
    model.blocks[2].first.bias.data = model.blocks[2].second.bias.data


def parametrized(model: Model) -> None:
    nn.utils.parametrizations.weight_norm(model.blocks[2].first)


CHANGES = [
    nothing, hooked, in_evaluation, frozen, scaled, tied, tied_across, shared_buffers, the_same_block, transposed,
    without_bias, gradient_hook, a_view_of_another, parametrized,
]  # fmt: skip


def steps(
    model: Model, call: Callable[..., torch.Tensor], change: Callable[[Model], None]
) -> list[torch.Tensor]:
    """Outputs and gradients of two steps, the change, two steps, and the state that they leave."""
    found: list[torch.Tensor] = []
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    for step in range(4):
        if step == 2:
            change(model)
        model.zero_grad()
        out = call(x + step)
        (out * torch.arange(12).reshape(3, 4)).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    found.append(p.grad.clone())
                    p -= 1e-2 * p.grad
        found += [out.detach(), *(t.detach().clone() for t in model.state_dict().values())]
    return found


@pytest.mark.sweep(15)
@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_blocks_that_differ(change: Callable[[Model], None], backend: str, early: bool) -> None:
    torch.manual_seed(0)
    plain = Model().double()
    other = copy.deepcopy(plain)
    if early:
        change(plain)
        change(other)
        change = nothing
    want = steps(plain, plain, change)
    got = steps(other, dynamotor.compile(other, backend=backend), change)
    torch.testing.assert_close(got, want)


def test_more_blocks_than_a_frame_may_have_programs() -> None:
    model = Model(20)
    before, frames = counters["capture"]["graphs"], counters["frames"].copy()
    compiled = dynamotor.compile(model, backend="eager")
    for _ in range(2):
        compiled(torch.ones(3, 4)).sum().backward()
    assert counters["capture"]["graphs"] - before <= 2
    assert counters["frames"]["cache_limit"] == frames["cache_limit"]


@pytest.mark.parametrize("depth, graphs", [(3, 3), (20, 9)])
@torch.no_grad()
def test_blocks_without_gradients_have_their_own_programs_while_they_are_few(depth: int, graphs: int) -> None:
    model = Model(depth).eval()
    before, full = counters["capture"]["graphs"], counters["frames"]["cache_limit"]
    compiled = dynamotor.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(3, 4)), model(torch.ones(3, 4)))
    assert counters["capture"]["graphs"] - before == graphs
    assert counters["frames"]["cache_limit"] == full
