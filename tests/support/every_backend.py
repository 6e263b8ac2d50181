"""Programs that each backend must compute as eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dynamotor

BACKENDS = ["eager", "aot_eager", "native"]


def same(fn: Callable[..., Any], *args: Any, backend: str) -> tuple[Any, Any]:
    """The results of the second compiled and eager call, both close, as those of the first are."""
    compiled = dynamotor.compile(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        ours, theirs = compiled(*args), fn(*args)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return ours, theirs
