"""The rest of a function behind a graph break that reaches no tensor runs as it is: one program for all calls."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

import dynamotor
from dynamotor.capture.host_code import are_plain, stays_on_host

SCALE = torch.tensor(2.0)


@pytest.fixture(autouse=True)
def counted_from_zero() -> None:
    dynamotor.reset()
    dynamotor.counters.clear()


def spans(length: int, width: int) -> np.ndarray:
    """Random spans of a mask, as SpecAugment draws them."""
    epsilon = np.random.rand(1).item()

    def count(size: int) -> int:
        return min(int(0.3 * size / width + epsilon), size // width)

    mask = np.zeros((2, length), dtype=bool)
    for row in range(2):
        starts = np.random.choice(np.arange(length - width), count(length), replace=False)
        for start in starts:
            mask[row, start : start + width] = True
    return mask


def masked(x: torch.Tensor) -> torch.Tensor:
    mask = torch.tensor(spans(x.shape[1], 2), dtype=torch.bool)
    return torch.where(mask, 0.0, x).sin() * 2


def test_numbers_drawn_by_numpy_give_one_program() -> None:
    compiled, x = dynamotor.compile(masked), torch.randn(2, 12)
    for seed in range(6):
        np.random.seed(seed)
        expected = masked(x)
        np.random.seed(seed)
        torch.testing.assert_close(compiled(x), expected)
    assert dynamotor.counters["capture"]["graphs"] == 1
    assert dynamotor.counters["frames"]["recompiled"] == 0


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * number()


def number() -> Any:
    drawn = np.random.rand(1).item()
    return drawn * 0 + SCALE.sin()


def test_a_rest_that_reaches_tensors_is_captured() -> None:
    compiled, x = dynamotor.compile(scaled), torch.randn(3)
    torch.testing.assert_close(compiled(x), x * SCALE.sin())
    assert dynamotor.counters["frames"]["on the host"] == 0


def hosts(n: int) -> float:
    return math.sqrt(sum(np.arange(n))) + len([k + 1 for k in range(n)])


def through_hosts(n: int) -> float:
    return hosts(n) * 2


def makes_tensors(n: int) -> Any:
    return torch.ones(n)


def imports(n: int) -> Any:
    import torch as t

    return t.ones(n)


def evaluates(text: str) -> Any:
    return eval(text)


def through_tensors(n: int) -> Any:
    return makes_tensors(n)


vectorized = np.vectorize(makes_tensors)


def through_an_object(n: int) -> Any:
    return vectorized(n)


@pytest.mark.parametrize("fn", [hosts, through_hosts, spans])
def test_functions_of_the_host(fn: Any) -> None:
    assert stays_on_host(fn.__code__, fn.__globals__)


@pytest.mark.parametrize(
    "fn", [makes_tensors, imports, evaluates, through_tensors, through_an_object, masked]
)
def test_functions_that_may_make_tensors(fn: Any) -> None:
    assert not stays_on_host(fn.__code__, fn.__globals__)


def test_values_that_lead_to_no_tensor() -> None:
    assert are_plain((1, 2.5, "a", None, [1, (2, {"k": np.float32(1)})], np.zeros(8), np.random.rand, hosts))
    for value in (
        SCALE,
        [SCALE],
        {"k": SCALE},
        np.zeros(10_000),
        np.array([SCALE], dtype=object),
        torch.nn.Linear(1, 1),
        functools.partial(makes_tensors, 1),
        makes_tensors,
        iter([1]),
    ):
        assert not are_plain((value,))
