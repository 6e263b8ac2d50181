"""Functions that change a tensor's shape in place while other views show it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def a_row(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    row = y[1]
    y.t_()
    return row * row


def a_written_row(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    row = y[1:]
    row.mul_(2)
    y.transpose_(0, -1)
    return row


def a_row_that_is_written_later(x: torch.Tensor) -> torch.Tensor:
    y = x.new_ones(3, 3)
    row = y[1]
    y.swapaxes_(0, 1)
    row.mul_(x[0])
    return y * x


def a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    view = y.t()[:]
    view.t_()
    y.mul_(2)
    return view


def twice(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    y.t_()
    row = y[1]
    y.t_()
    return row * row


def a_view_alone(x: torch.Tensor) -> torch.Tensor:
    row, whole = x.sin()[1], x * x
    row.unsqueeze_(0)
    whole.t_()
    whole.mul_(2)
    return row + whole


FUNCTIONS = [a_row, a_written_row, a_row_that_is_written_later, a_view, twice]


def gradient(run: Callable, device: str) -> torch.Tensor:
    """The gradient of a function of a square matrix, with cotangents that tell its elements apart."""
    x = torch.arange(9.0).view(3, 3).to(device).requires_grad_()
    result = run(x)
    cotangent = torch.arange(float(result.numel())).view(result.shape).to(device)
    return torch.autograd.grad(result, x, cotangent)[0]
