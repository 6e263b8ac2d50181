"""A half that a graph returned was rounded, and not where the same graph went on with it: `y - y.floor()`
could be 1.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor

JUMPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "floor": torch.floor, "ceil": torch.ceil, "round": torch.round, "trunc": torch.trunc, "frac": torch.frac,
    "remainder": lambda y: y % 0.75, "fmod": lambda y: torch.fmod(y, 0.75), "floor_divide": lambda y: y // 0.75,
    "div": lambda y: torch.div(y, 0.75, rounding_mode="floor"), "int": lambda y: y.int(), "long": lambda y: y.long(),
    "bool": lambda y: (y * 4).floor().bool(), "argmax": lambda y: y.argmax(-1), "max": lambda y: y.max(-1).indices,
    "argmin of all": torch.argmin, "at least": lambda y: y >= y.amax(-1, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", JUMPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_jumps_follows_from_what_is_returned(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, jump = torch.randn(33, 49).to(dtype), torch.randn(49).to(dtype), JUMPS[name]

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.sin(x * w + x) * x * 8
        return y, jump(y)

    y, found = dynamotor.compile(f)(x, w)
    assert torch.equal(found, jump(y))
