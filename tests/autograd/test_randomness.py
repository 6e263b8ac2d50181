"""Random numbers have the digits of their type, and small probabilities are exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.base.config import config


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_float64_has_53_bits(backend: str) -> None:
    rand = dynamotor.compile(lambda: torch.rand(4000, dtype=torch.float64), backend=backend)
    uniform = dynamotor.compile(lambda: torch.empty(4000, dtype=torch.float64).uniform_(), backend=backend)
    for x in (rand(), uniform()):
        assert x.min() >= 0 and x.max() < 1
        bits = (x * 2.0**53).long()
        assert torch.equal(bits.double() / 2.0**53, x)
        for bit in range(53):  # each is set half of the time
            assert 0.4 < float((bits >> bit & 1).double().mean()) < 0.6, bit


def test_float64_is_uniform() -> None:
    x = dynamotor.compile(lambda: torch.rand(200_000, dtype=torch.float64))().sort().values
    steps = torch.arange(1, len(x) + 1, dtype=torch.float64) / len(x)
    assert float((x - steps).abs().max()) < 0.006  # Kolmogorov-Smirnov at 1e-6


@pytest.mark.parametrize("p", [1e-9, 3e-8, 1e-7, 2e-6, 1 - 2e-6])
def test_small_probabilities(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    n, calls = 1_000_000, 20
    monkeypatch.setattr(config, "check", False)  # which draws all numbers in PyTorch once more
    count = dynamotor.compile(lambda: torch.empty(n, dtype=torch.bool).bernoulli_(p).sum())
    dropped = dynamotor.compile(lambda: (F.dropout(torch.ones(n), p) == 0).sum())
    for draw in (count, dropped):
        found = sum(int(draw()) for _ in range(calls))
        few, expected = (found, n * calls * p) if p < 0.5 else (n * calls - found, n * calls * (1 - p))
        assert abs(few - expected) <= 6 * expected**0.5 + 3


def test_ordinary_probabilities_draw_once() -> None:
    from dynamotor.base.events import collect

    with collect("joint") as joint:
        dynamotor.compile(lambda x: F.dropout(x, 0.1), backend="aot_eager")(torch.ones(8))
    (event,) = joint
    draws = [n for n in event.data["graph"].graph.nodes if n.target is torch.ops.dynamotor.rand.default]
    assert len(draws) == 1
