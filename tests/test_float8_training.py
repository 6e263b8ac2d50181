"""Layers that compute in float8 train beside eager: the same numbers, one graph, and no number rounded twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor.base.events import collect, counters
from tests.support.float8_layer import Float8Layer

pytestmark = pytest.mark.filterwarnings("error::dynamotor.base.errors.EagerWarning")


class Block(nn.Module):
    """The feed-forward half of a decoder's layer."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up = (Float8Layer(64, 96, rows) for _ in range(2))
        self.down = Float8Layer(96, 64, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def model_of(rows: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(rows), Block(rows))


def batch() -> torch.Tensor:
    return torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, step: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[float], Any]:
    losses = [float(step(batch())) for _ in range(3)]
    return losses, model.state_dict()


def eager_step(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (call or model)(x).square().mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        return loss.detach()

    return step


def same(one: Any, other: Any) -> None:
    assert one[0] == pytest.approx(other[0], rel=2e-3)
    for name, value in one[1].items():
        torch.testing.assert_close(value, other[1][name], rtol=2e-2, atol=2e-3, msg=name)


@pytest.mark.parametrize("rows", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("target", ["cpp", "triton"])
@pytest.mark.parametrize("whole", [False, True], ids=["compile", "compile_step"])
def test_training_beside_eager(rows: bool, target: str, whole: bool) -> None:
    if target == "triton" and not pytest.importorskip("bench.triton_interpret").available():
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    model = model_of(rows)
    twin = copy.deepcopy(model)
    before = dict(counters["fallback"])
    with dynamotor.config.patch(target=target, strict=True):
        if whole:
            sgd = torch.optim.SGD(model.parameters(), lr=0.05)
            compiled = dynamotor.compile_step(model, lambda y, x: y.square().mean(), sgd)
            found = trained(model, lambda x: compiled(x, x))
        else:
            found = trained(model, eager_step(model, dynamotor.compile(model, fullgraph=True)))
    assert dict(counters["fallback"]) == before
    same(found, trained(twin, eager_step(twin)))


def programs(rows: bool, whole: bool) -> list[str]:
    """The call programs of a step for a GPU, with maps that are large enough to have a launch each."""
    if not pytest.importorskip("bench.triton_interpret").available():
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    layers = [Float8Layer(768, 768, rows) for _ in range(2)]
    model, x = nn.Sequential(nn.RMSNorm(768), layers[0], nn.SiLU(), layers[1]), torch.randn(768, 768)
    with dynamotor.config.patch(target="triton", strict=True), collect("code") as events:
        if whole:
            sgd = torch.optim.SGD(model.parameters(), lr=0.05)
            compiled = dynamotor.compile_step(model, lambda y, x: y.square().mean(), sgd)
            compiled(x, x), compiled(x, x)
        else:
            eager_step(model, dynamotor.compile(model))(x)
    return [event.data["python"] for event in events]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["compile", "compile_step"])
def test_each_number_is_rounded_once_in_both_layouts(whole: bool) -> None:
    """One launch rounds an operand for the products of forward and backward: of two layers' inputs, weights and
    gradients, six. Only a largest number of the backward is found in the kernel that makes the gradient."""
    text = "\n".join(programs(False, whole))
    rounding = [line for line in text.splitlines() if "k" in line and "clone_default" in line]
    assert len(rounding) == 6 and all("_to_copy" in line for line in rounding), rounding
    assert text.count("_scaled_mm(") == 6
