"""Gradient hooks of leaves that the loss does not depend on: they were called with None."""

from __future__ import annotations

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def test_hooks_of_the_head_that_the_loss_does_not_see() -> None:
    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    model = Heads()
    accumulated = []
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 2)
        p.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.sum()))
    compiled, x = dynamotor.compile(model), torch.ones(4, 3)
    compiled(x)[0].sum().backward()
    assert torch.equal(model.a.weight.grad, torch.full((2, 3), 8.0))
    assert model.b.weight.grad is None and len(accumulated) == 2
    compiled(x)[1].sum().backward()
    assert torch.equal(model.b.weight.grad, torch.full((2, 3), 8.0))


def test_hooks_of_an_input_without_any_gradient() -> None:
    called = []
    leaf, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    middle = other * 2
    middle.register_hook(called.append)
    other.register_hook(called.append)
    dynamotor.compile(lambda x, y: x * y.detach())(leaf, middle).sum().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 2.0)) and not called and other.grad is None


def test_a_hook_of_several_leaves_is_called_once_all_are_through() -> None:
    called = []
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    torch.autograd.graph.register_multi_grad_hook((a, b), called.append)
    dynamotor.compile(lambda a, b: (a * 2, b * 3))(a, b)[0].sum().backward()
    ((first, second),) = called
    assert torch.equal(first, torch.full((3,), 2.0)) and second is None
