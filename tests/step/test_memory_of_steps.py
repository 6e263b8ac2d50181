"""Whole steps that compute cheap values again in their backward, in Triton's interpreter."""

import copy

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor.base.events import collect

pytest.importorskip("triton")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_a_step_that_computes_again_trains_as_eager_does():
    torch.manual_seed(0)
    model, x, y = nn.Sequential(Block(), Block()), torch.randn(4, 8), torch.randn(4, 8)
    other = copy.deepcopy(model)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other))
    with dynamotor.config.patch(target="triton"), collect("pass") as passes:
        step = dynamotor.compile_step(model, nn.functional.mse_loss, mine)
        for _ in range(3):
            loss = step(x, y)
            expected = nn.functional.mse_loss(other(x), y)
            expected.backward()
            theirs.step()
            theirs.zero_grad()
            torch.testing.assert_close(loss, expected.detach())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    (texts,) = [e.data for e in passes if e.data["name"] == "compute again"]
    gelus = [texts[when].count("aten.gelu.default(") for when in ("before", "after")]
    assert gelus == [2, 4]  # each once more, instead of being kept


def test_what_a_batch_norm_makes_is_computed_again_from_its_statistics():
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)]
    layers = [
        layer for norm in norms for layer in (nn.Conv2d(4, 4, 3, padding=1, bias=False), norm, nn.ReLU())
    ]
    model, x, y = nn.Sequential(*layers, nn.Conv2d(4, 2, 1)), torch.randn(2, 4, 6, 6), torch.randn(2, 2, 6, 6)
    other = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    with dynamotor.config.patch(target="triton"), collect("pass") as passes:
        step = dynamotor.compile_step(model, nn.functional.mse_loss, mine)
        for _ in range(2):
            loss = step(x, y)
            expected = nn.functional.mse_loss(other(x), y)
            expected.backward()
            theirs.step()
            theirs.zero_grad()
            torch.testing.assert_close(loss, expected.detach())
    for (name, p), q in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)
    (texts,) = [e.data for e in passes if e.data["name"] == "compute again"]
    assert texts["after"].count("aten.batch_norm_elemt.default(") == 4  # two of them for the backward
    assert texts["after"].count("aten._native_batch_norm_legit_functional.default(") == 2
