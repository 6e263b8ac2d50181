"""Whole steps that compute cheap values again in their backward, in Triton's interpreter."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor.autograd.extract import memory_root
from dynamotor.base.events import collect
from dynamotor.step import step_program
from dynamotor.step.rematerialise import compute_again

pytest.importorskip("triton")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def trained_beside_eager(
    model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], x: torch.Tensor, y: torch.Tensor
) -> dict[str, str]:
    """The graph's text "before" and "after" the pass; the step trains as the eager loop does."""
    other = copy.deepcopy(model)
    mine, theirs = optimizer(model.parameters()), optimizer(other.parameters())
    with dynamotor.config.patch(target="triton"), collect("pass") as passes:
        step = dynamotor.compile_step(model, nn.functional.mse_loss, mine)
        for _ in range(3):
            loss = step(x, y)
            expected = nn.functional.mse_loss(other(x), y)
            expected.backward()
            theirs.step()
            theirs.zero_grad()
            torch.testing.assert_close(loss, expected.detach())
    for (name, p), q in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)
    (texts,) = [e.data for e in passes if e.data["name"] == "compute again"]
    return texts


def test_a_step_that_computes_again_trains_as_eager_does():
    torch.manual_seed(0)
    model, adamw = nn.Sequential(Block(), Block()), functools.partial(torch.optim.AdamW, lr=1e-2)
    texts = trained_beside_eager(model, adamw, torch.randn(4, 8), torch.randn(4, 8))
    gelus = [texts[when].count("aten.gelu.default(") for when in ("before", "after")]
    assert gelus == [2, 4]  # each once more, instead of being kept


def test_a_value_is_made_again_behind_its_gradient(monkeypatch):
    graphs = []

    def noted(gm):
        compute_again(gm)
        graphs.append(list(gm.graph.nodes))

    monkeypatch.setattr(step_program, "compute_again", noted)
    torch.manual_seed(0)
    trained_beside_eager(
        Block(), functools.partial(torch.optim.SGD, lr=0.1), torch.randn(4, 8), torch.randn(4, 8)
    )
    (nodes,) = graphs
    (gradient,) = (n for n in nodes if n.target is torch.ops.aten.gelu_backward.default)
    _, again = (n for n in nodes if n.target is torch.ops.aten.gelu.default)
    assert nodes.index(memory_root(gradient.args[0])) < nodes.index(again) < nodes.index(gradient)


def test_what_a_batch_norm_makes_is_computed_again_from_its_statistics():
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)]
    layers = [
        layer for norm in norms for layer in (nn.Conv2d(4, 4, 3, padding=1, bias=False), norm, nn.ReLU())
    ]
    model, sgd = nn.Sequential(*layers, nn.Conv2d(4, 2, 1)), functools.partial(torch.optim.SGD, lr=0.1)
    texts = trained_beside_eager(model, sgd, torch.randn(2, 4, 6, 6), torch.randn(2, 2, 6, 6))
    assert texts["after"].count("aten.batch_norm_elemt.default(") == 4  # two of them for the backward
    assert texts["after"].count("aten._native_batch_norm_legit_functional.default(") == 2


def test_weights_are_cast_once_although_their_update_reads_them():
    model = nn.Sequential(nn.Linear(8, 1 << 16), nn.Linear(1 << 16, 8))  # large enough to be made again
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with dynamotor.config.patch(target="triton"), collect("pass") as passes:
        step = dynamotor.compile_step(model, nn.functional.mse_loss, optimizer)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                step(x, y)
    (texts,) = [e.data for e in passes if e.data["name"] == "compute again"]
    casts = [texts[when].count("_weight, dtype=torch.bfloat16)") for when in ("before", "after")]
    assert casts == [2, 2]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(2, 16, 16) / 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([16, 32], dtype=torch.int32)
        up = torch.nn.functional.grouped_mm(x, self.up, offs=ends)
        return x + torch.nn.functional.grouped_mm(nn.functional.silu(up), self.down, offs=ends)


def test_an_operand_of_a_product_of_groups_is_made_again_in_the_backward():
    torch.manual_seed(0)
    x, y = torch.randn(32, 16, dtype=torch.float32), torch.randn(32, 16)
    model = nn.Sequential(Experts(), Experts())
    with dynamotor.config.patch(target="triton"), collect("code") as codes:
        step = dynamotor.compile_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(2):
            step(x, y)
    lines = codes[-1].data["python"].splitlines()
    made = [n for n, line in enumerate(lines) if "silu_default" in line]
    (loss,) = (n for n, line in enumerate(lines) if "mse_loss_backward" in line)
    assert len(made) == 4 and made[1] < loss < made[2] and made[3] - made[2] > 3  # each beside its gradients
