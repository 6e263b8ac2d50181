"""Modules that move to the device and back: identity, ties, gradients, optimizers made before."""

import copy
import weakref

import pytest
import torch
from warned import text_of

pytest.importorskip("jax", reason="jax is not installed")

import dynamotor.xla  # noqa: E402, F401
from dynamotor.base.events import forget_warnings  # noqa: E402
from dynamotor.xla.sync import sync  # noqa: E402
from dynamotor.xla.tensor import XLATensor  # noqa: E402


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x):
        return self.head(self.embedding(x)) * self.scale


def train(model, optimizer, steps, seed=0):
    torch.manual_seed(seed)
    where = model.scale.device
    for _ in range(steps):
        x = torch.randint(0, 7, (5,)).to(where)
        torch.nn.functional.cross_entropy(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        sync()


def test_parameters_stay_the_same_objects_and_tied_there_and_back():
    model = Tied()
    weight, expected = model.head.weight, model.head.weight.detach().clone()
    model.to("xla")
    assert model.head.weight is weight and model.embedding.weight is weight and type(weight) is XLATensor
    assert (
        isinstance(weight, torch.nn.Parameter) and weight.requires_grad and len(list(model.parameters())) == 1
    )
    torch.testing.assert_close(weight.detach().cpu(), expected)
    model.half()
    assert model.embedding.weight is weight and weight.dtype is torch.float16
    model.float().cpu()
    assert (
        model.embedding.weight is weight
        and model.head.weight is weight
        and type(weight) is torch.nn.Parameter
    )
    assert weight.requires_grad and weight.device.type == "cpu"
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.AdamW(p, lr=0.05), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)]
)
def test_an_optimizer_made_before_trains_the_moved_model_with_its_state(make):
    torch.manual_seed(1)
    model = Tied()
    expected = copy.deepcopy(model)
    optimizer, other = make(model.parameters()), make(expected.parameters())
    for where in ("cpu", "xla", "cpu"):
        model.to(where)
        train(model, optimizer, 3)
        train(expected, other, 3)
        torch.testing.assert_close(
            model.head.weight.detach().cpu(), expected.head.weight.detach(), rtol=1e-4, atol=1e-5
        )
    for mine, reference in zip(optimizer.state.values(), other.state.values()):
        for name, value in reference.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5)


def test_gradients_move_along():
    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    expected = model.weight.grad.clone()
    model.to("xla")
    assert type(model.weight.grad) is XLATensor
    torch.testing.assert_close(model.weight.grad.cpu(), expected)
    model.cpu()
    assert type(model.weight.grad) is torch.Tensor
    torch.testing.assert_close(model.weight.grad, expected)
    model(torch.ones(1, 3)).sum().backward()
    torch.testing.assert_close(model.weight.grad, 2 * expected)


@pytest.mark.parametrize("reason", ["graph", "weak reference"])
def test_where_a_parameter_cannot_keep_its_identity_a_warning_says_so(reason, recwarn):
    forget_warnings()
    model = torch.nn.Linear(3, 2)
    held = model(torch.ones(1, 3, requires_grad=True)) if reason == "graph" else weakref.ref(model.weight)
    before = model.weight
    model.to("xla")
    assert model.weight is not before and type(model.weight) is XLATensor
    assert "another Python object" in text_of(recwarn)
    assert held is not None


def test_a_moved_parameter_says_nothing_of_parts():
    with torch.no_grad():
        moved = torch.nn.Linear(3, 2).to("xla").weight
    assert not torch.utils._python_dispatch.is_traceable_wrapper_subclass(moved)
