"""An op whose results tell a size, as attention of a GPU tells its gradient the lengths: the program stays general."""

from __future__ import annotations

import torch

import dynamotor
from dynamotor.base.events import counters


def _first_half(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x.sin(), x.shape[0] // 2


def test_a_size_that_an_op_returns() -> None:
    library = torch.library.Library("aten", "FRAGMENT")
    library.define("dynamotor_first_half(Tensor x) -> (Tensor, SymInt)")
    for key in ("CPU", "Meta"):
        library.impl("dynamotor_first_half", _first_half, key)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y, n = torch.ops.aten.dynamotor_first_half(x)
        return y[:n] * n

    dynamotor.reset()
    captured = counters["frames"]["captured"]
    compiled = dynamotor.compile(fn, dynamic=True)
    for size in (6, 9, 32):
        x = torch.randn(size, 3)
        torch.testing.assert_close(compiled(x), fn(x))
    assert counters["frames"]["captured"] == captured + 1
