"""`t_()` of a tensor that other views show (91001:5626): eager makes the history of those views again by addresses,
PyTorch for tensors without memory by the views' ops, on the turned tensor: gradients of other elements came back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor
import dynamotor.xla  # noqa: F401  (the device)
from dynamotor.base.errors import XlaError


def _a_row(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    row = y[1]
    y.t_()
    return row * row


def _a_written_row(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    row = y[1:]
    row.mul_(2)
    y.transpose_(0, -1)
    return row


def _a_row_that_is_written_later(x: torch.Tensor) -> torch.Tensor:
    y = x.new_ones(3, 3)
    row = y[1]
    y.swapaxes_(0, 1)
    row.mul_(x[0])
    return y * x


def _a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    view = y.t()[:]
    view.t_()
    y.mul_(2)
    return view


def _twice(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    y.t_()
    row = y[1]
    y.t_()
    return row * row


@pytest.mark.parametrize("function", [_a_row, _a_written_row, _a_row_that_is_written_later, _a_view, _twice])
def test_gradients_are_eagers_and_refused_on_the_device_xla(function: Callable) -> None:
    def gradient(run: Callable, device: str) -> torch.Tensor:
        x = torch.arange(9.0).view(3, 3).to(device).requires_grad_()
        result = run(x)
        cotangent = torch.arange(float(result.numel())).view(result.shape).to(device)
        return torch.autograd.grad(result, x, cotangent)[0]

    expected = gradient(function, "cpu")
    for backend in ("native", "aot_eager"):
        torch.testing.assert_close(gradient(dynamotor.compile(function, backend=backend), "cpu"), expected)
    with pytest.raises(XlaError, match="DM620"):
        gradient(function, "xla")


def test_a_view_alone_or_a_tensor_alone_is_compiled() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        row, whole = x.sin()[1], x * x
        row.unsqueeze_(0)
        whole.t_()
        whole.mul_(2)
        return row + whole

    for device in ("cpu", "xla"):
        x = torch.arange(9.0).view(3, 3).to(device).requires_grad_()
        found = [
            torch.autograd.grad(run(x).square().sum(), x)[0].cpu()
            for run in (function, dynamotor.compile(function, fullgraph=True, backend="aot_eager"))[
                : 1 + (device == "cpu")
            ]
        ]
        torch.testing.assert_close(found[-1], found[0])
