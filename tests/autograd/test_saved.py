"""A saved tensor may come back to its backward with another layout: the backward read memory by the layout of the
forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import dynamotor

pytestmark = pytest.mark.regression


def _function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh() * x.sin().sum(1, keepdim=True)


def _gradients(function: Callable, change: Callable, given_back: Callable) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    with saved_tensors_hooks(torch.Tensor.detach, given_back) if given_back else torch.enable_grad():
        y = function(x, w)
    change(x, w)
    return torch.autograd.grad(y.square().sum(), (x, w))


def _apart(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, t], -1)[..., 0]


def _no_change(x: torch.Tensor, w: torch.Tensor) -> None:
    pass


CASES = {
    "column-major": (_no_change, lambda t: t.mT.contiguous().mT),
    "apart": (_no_change, _apart),
    "negative": (_no_change, lambda t: torch._neg_view(-t)),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("case", CASES)
def test_a_saved_tensor_that_lies_elsewhere_is_read_there(case: str, dynamic: bool | None) -> None:
    compiled = dynamotor.compile(_function, dynamic=dynamic)
    torch.testing.assert_close(_gradients(compiled, *CASES[case]), _gradients(_function, *CASES[case]))


def _smaller(x: torch.Tensor, w: torch.Tensor) -> None:
    w.data = torch.ones(2, 3)


def _wider(x: torch.Tensor, w: torch.Tensor) -> None:
    w.data = w.data.double()


@pytest.mark.parametrize("change", [_smaller, _wider])
def test_a_saved_tensor_of_another_size_or_type_is_refused(change: Callable) -> None:
    with pytest.raises(dynamotor.DynamotorError, match="DM407"):
        _gradients(dynamotor.compile(_function), change, None)


def test_an_expanded_tensor_comes_back_expanded() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).sin()

    found = []
    for run in (f, dynamotor.compile(f)):
        x, y = torch.arange(1.0, 5).requires_grad_(), torch.tensor([[2.0], [3.0]]).expand(2, 4)
        with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.clone):
            z = run(x, y)
        found.append(torch.autograd.grad(z.sum(), x)[0])
    torch.testing.assert_close(found[1], found[0])


# What eager saves of something made of `x` stays as it was when `x.data` is replaced; here the backward makes it
# again, so that other data is refused.
MADE = {
    "cast": lambda x: x.double().sin().sum(),
    "shifted": lambda x: (x + 1).sin(),
    "a view": lambda x: x.view(-1).sin() * x.t().reshape(-1),
    "a product": lambda x: (x.t() @ x.relu()).exp(),
    "the tensor itself": lambda x: x.sin(),
}


@pytest.mark.parametrize("of", MADE)
def test_other_data_is_refused(of: str) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    y = dynamotor.compile(MADE[of])(x)
    x.data = torch.randn(4, 4)
    for _ in range(2):
        with pytest.raises(dynamotor.DynamotorError, match="DM407"):
            y.sum().backward(retain_graph=True)


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_data_replaced_in_the_function_after_a_use(backend: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = (x + 1).sin()
        x.data = y.detach()
        return y

    x, other = (torch.linspace(-1, 1, 3, requires_grad=True) for _ in range(2))
    dynamotor.compile(f, backend=backend)(x).sum().backward()
    f(other).sum().backward()
    torch.testing.assert_close((x, x.grad), (other, other.grad))


def test_data_that_goes_and_comes_back_in_the_same_storage() -> None:
    x = torch.arange(4.0).requires_grad_()
    y = dynamotor.compile(torch.sin)(x)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    with torch.no_grad():
        x.data.copy_(torch.arange(4.0))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.arange(4.0).cos())


def _written_beside(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x += (y * 2 + 1) * w  # x asks for a gradient from here on: eager PyTorch writes
    return x


def _written_before(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = (y * 2 + 1) * w
    x.mul_(z)
    return x + z


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("function", [_written_beside, _written_before])
def test_a_write_into_another_view_of_an_inputs_memory(function: Callable, backend: str) -> None:
    """81002:22071: the part before the write kept `y`, which eager does not; autograd counts by storage."""
    found = []
    for run in (function, dynamotor.compile(function, backend=backend)):
        whole, w = torch.arange(16.0).view(4, 4), torch.full((4,), 0.5, requires_grad=True)
        torch.manual_seed(0)
        result = run(whole[:3], whole[3], w)
        found.append((result, *torch.autograd.grad(result.square().sum(), w)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_the_error_of_a_kept_input_that_was_written_says_why() -> None:
    """A buffer is kept, where eager keeps a result of it."""
    module = torch.nn.BatchNorm1d(4)
    w = torch.ones(4, requires_grad=True)
    result = dynamotor.compile(lambda w: (module.running_mean * 2 + 1) * w)(w)
    module.running_mean.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        result.sum().backward()
    assert any("DM410" in note for note in raised.value.__notes__)


@pytest.mark.regression
@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize(
    "write", [lambda x: x.add_(1), lambda x: x.data.add_(1), lambda x: np.add(x.numpy(), 1, out=x.numpy())]
)
def test_an_input_that_is_written_before_the_backward(write: Any, backend: str) -> None:
    """Eager has saved the results of it."""
    compiled = dynamotor.compile(lambda x, w: (x * 2 + 1) * w, backend=backend)
    x, w = torch.arange(4.0), torch.ones(4, requires_grad=True)
    result = compiled(x, w)
    write(x)
    result.sum().backward()
    assert torch.equal(w.grad, torch.arange(4.0) * 2 + 1)


@pytest.mark.regression
def test_an_input_of_inference_mode_is_not_saved() -> None:
    """Autograd refuses to save one: eager saves a result of it, a compiled backward might want it."""
    with torch.inference_mode():
        x = torch.randn(3)
    weight = torch.randn(3, requires_grad=True)

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.clone() * weight

    result = dynamotor.compile(program)(x, weight)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), weight)[0], x.clone())
