"""A user's program for `mypy --strict` and pyright: each line marked `wrong` must be an error, no other."""

from collections.abc import Callable
from typing import assert_type

import torch

import dynamotor


def scale(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by


@dynamotor.compile
def shift(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@dynamotor.compile(fullgraph=True, mode="reduce-overhead", options={"threads": 2, "epilogue_fusion": True})
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@dynamotor.compile
class Net(torch.nn.Module):
    width = 2


fast = dynamotor.compile(scale, backend="native", dynamic=None)
assert_type(fast(torch.ones(2), by=3.0), torch.Tensor)
assert_type(shift(halve(torch.ones(2))), torch.Tensor)
assert_type(dynamotor.compile(torch.nn.Linear(2, 2)), torch.nn.Linear)
assert_type(Net.width, int)
assert_type(dynamotor.config.threads, int)
assert_type(dynamotor.explain(scale)(torch.ones(2)).graph_count, int)
unmarked: Callable[[torch.Tensor], torch.Tensor] = dynamotor.disable(shift)
dynamotor.config.threads = 2
with dynamotor.config.patch(strict=True):
    dynamotor.config.update(log="breaks")

fast(torch.ones(2), by="2")  # wrong
fast(torch.ones(2), bye=2.0)  # wrong
halve("x")  # wrong
dynamotor.config.treads = 3  # wrong
dynamotor.config.threads = "3"  # wrong
print(dynamotor.config.treads)  # wrong
dynamotor.config.update(treads=3)  # wrong
dynamotor.compile(scale, options={"treads": 2})  # wrong
dynamotor.compile(scale, fulgraph=True)  # wrong
dynamotor.compile(scale, mode="fastest")  # wrong
dynamotor.mark_dynamic("x", 0)  # wrong
