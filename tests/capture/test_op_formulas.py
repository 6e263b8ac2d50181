"""What `register_fake` and `register_vmap` read by name is guarded, or runs at each call."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

N = 3
TABLE: dict[str, Any] = {"n": 3}
SETTINGS = types.SimpleNamespace(n=3)
HELD: list[Any] = [torch.ones(3)]
LIBRARY = torch.library.Library("op_formulas_library", "DEF")


def set_global(n: int) -> None:
    global N
    N = n


READS: dict[str, tuple[Callable[[], int], Callable[[int], None]]] = {
    "a global": (lambda: N, set_global),
    "an item": (lambda: TABLE["n"], lambda n: TABLE.update(n=n)),
    "an attribute": (lambda: SETTINGS.n, lambda n: setattr(SETTINGS, "n", n)),
    "a tensor's size": (lambda: len(HELD[0]), lambda n: HELD.__setitem__(0, torch.ones(n))),
}


def operator(name: str, size: Callable[[], int], in_library: bool) -> Any:
    """An operator whose result has a size that is read from outside."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(size()) * x.sum()

    def fake(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(size())

    name = name.replace(" ", "_").replace("'", "")
    if not in_library:
        op = torch.library.custom_op(f"op_formulas::{name}", kernel, mutates_args=())
        op.register_fake(fake)
        return op
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"op_formulas_library::{name}", fake)
    return getattr(torch.ops.op_formulas_library, name)


@pytest.mark.parametrize("in_library", [False, True], ids=["custom_op", "library"])
@pytest.mark.parametrize("name", READS)
def test_a_fake_that_reads_something_else_later(name: str, in_library: bool) -> None:
    size, change = READS[name]
    change(3)
    op = operator(name, size, in_library)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = op(x.sin())
        return y * y.shape[0] + 1

    dynamotor.reset()
    compiled, x = dynamotor.compile(program), torch.ones(2)
    for n in (3, 4, 2, 3):
        change(n)
        torch.testing.assert_close(compiled(x), program(x))
    assert counters["capture"]["graphs"] <= 5


FACTOR = 1.0


def test_a_vmap_rule_that_reads_something_else_later() -> None:
    global FACTOR

    @torch.library.custom_op("op_formulas::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(lambda x: torch.empty_like(x))
    doubled.register_vmap(lambda info, dims, x: (x * 2 * FACTOR, dims[0]))

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(doubled)(x) + 1

    compiled, x = dynamotor.compile(program), torch.ones(3)
    for factor in (1.0, 2.0, 3.0):
        FACTOR = factor
        torch.testing.assert_close(compiled(x), program(x))
