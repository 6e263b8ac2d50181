"""Kernels that take sizes as arguments, on a GPU against eager: results and gradients for one shape after the
other.

>>> [work() for _, work in rows("cuda")]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from dynamotor.api import compile as compile_
from dynamotor.base.events import counters

from .numerics import largest_error

SHAPES = ((512, 768), (640, 768), (640, 800), (333, 770), (1, 51), (2048, 1024), (77, 4099))


def _twice(x: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    return torch.where(dropped == 0, x * 2, dropped)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "map": lambda x: F.gelu(x) * x + 1,
    "softmax": lambda x: torch.softmax(x, -1) * 2,
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "mean of columns": lambda x: torch.tanh(x) - x.mean(0),
    "transposed": lambda x: x.t().contiguous() * 3,
    "padding and slices": lambda x: F.pad(x, (1, 2, 3, 0))[1:, ::2].exp(),
    "parts": lambda x: torch.cat([x, x[:, : x.shape[1] // 3] * 2], 1),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(len(x), device=x.device) % x.shape[1]),
    "running sums": lambda x: x.cumsum(1) / x.shape[1],
    "reversed": lambda x: x[torch.arange(len(x) - 1, -1, -1, device=x.device)] * 2,
    "dropout": lambda x: _twice(
        x, F.dropout(x, 0.5)
    ),  # 2x whatever is dropped, unless the backward drops something else
}


def check(fn: Callable[[torch.Tensor], torch.Tensor], device: str) -> dict[str, Any]:
    """The largest relative error over all shapes; which kernels took arguments is counted."""
    counters.clear()
    call, worst = compile_(fn), 0.0
    for shape in SHAPES:
        x = torch.randn(shape, device=device)
        tangent, results = torch.randn_like(fn(x)), []
        for run in (call, fn):
            leaf = x.clone().requires_grad_()
            out = run(leaf)
            out.backward(tangent)
            results.append([out.detach(), leaf.grad])
        worst = max(worst, largest_error(*results))
    taken = counters["kernels"]["variants for sizes"]
    return {
        "error_out": worst,
        "kernels with arguments": taken,
        "ok": worst < 1e-4 and (taken > 0 or device == "cpu"),
    }


def rows(device: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names and checks."""
    for name, fn in FUNCTIONS.items():
        yield name, lambda fn=fn: check(fn, device)
