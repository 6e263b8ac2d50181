"""Attention with the masks of `bench.llm_rows` on a GPU: outputs and gradients beside eager's own error, both
against float64.

>>> dict(rows("cuda"))["attention-window"]()["ok"]
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dynamotor.api import compile as compile_
from dynamotor.base.config import config
from dynamotor.base.events import counters

from .llm_rows import ATTENTION, BOUND, masked_attention
from .numerics import relative_error

_LONG = ("attention-window", "attention-chunk")


def rows(
    device: str, length: int = 1100, small: bool = False
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The check of each mask, by name."""
    for name in ATTENTION:
        if name != BOUND:
            yield name, partial(_check, name, device, length, small)


def _check(name: str, device: str, length: int, small: bool) -> dict[str, Any]:
    """Right where each error is at most twice eager's, and the mask was read as it should be."""
    torch.manual_seed(0)
    attend, (*tensors, ids) = masked_attention(name, 2, length, device, small)
    half = [t.detach().to(torch.bfloat16).requires_grad_() for t in tensors]
    wide = [t.detach().double().requires_grad_() for t in half]
    grad = torch.randn(tensors[0].shape, device=device)
    exact = _results(attend, wide, ids, grad.double())
    eager = _results(attend, half, ids, grad.bfloat16())
    before = counters["attention masks"]["blocks"]
    with config.patch(target="triton" if device == "cpu" else ""):
        ours = _results(compile_(attend), half, ids, grad.bfloat16())
    blocks = counters["attention masks"]["blocks"] - before
    ours_by, eager_by = (list(map(relative_error, found, exact)) for found in (ours, eager))
    close = all(a <= 2 * b + 1e-3 for a, b in zip(ours_by, eager_by, strict=True))
    # A causal mask is left to PyTorch's kernel, and windows and chunks of 1,024 are causal up to there.
    expected = int(name not in ("attention", *_LONG) or name in _LONG and length > 1024)
    return {"errors": ours_by, "eager": eager_by, "blocks": blocks, "ok": close and blocks == expected}


def _results(
    call: Callable[..., torch.Tensor], given: list[torch.Tensor], ids: torch.Tensor, grad: torch.Tensor
) -> list[torch.Tensor]:
    out = call(*given, ids)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]
