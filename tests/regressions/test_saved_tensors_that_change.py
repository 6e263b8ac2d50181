"""What a forward saved may come back to its backward lying otherwise: the backward read memory by the layout of the
forward.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import dynamotor


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


def _column_major(x: torch.Tensor, w: torch.Tensor) -> None:
    w.data = w.data.t().contiguous().t()


def _both_apart(x: torch.Tensor, w: torch.Tensor) -> None:
    x.data, w.data = _apart(x.data), _apart(w.data)


CASES = {
    "column-major": (_no_change, lambda t: t.mT.contiguous().mT),
    "apart": (_no_change, _apart),
    "negative": (_no_change, lambda t: torch._neg_view(-t)),
    "data": (_column_major, None),
    "both data": (_both_apart, None),
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
