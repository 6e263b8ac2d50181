"""Random programs on the xla device: lazily, many in one graph, and through the bridge."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("jax", reason="the xla device needs jax")

import dynamotor.xla  # noqa: E402, F401
from fuzz import fusion, fuzzers, xla  # noqa: E402
from fuzz.program import Input, Program, Step  # noqa: E402


@pytest.mark.parametrize(("way", "count"), [("xla", 16), ("xla-bridge", 3)])
def test_programs_of_a_fixed_seed_are_right(way: str, count: int) -> None:
    verdicts = fusion.judged([fusion.generated(5, n, way) for n in range(count)], way)
    assert {v.trial.name: v.problems for v in verdicts if v.problems} == {}
    assert sum(not v.skipped for v in verdicts) > 0.8 * count


def test_views_writes_gradients_and_memory_are_compared() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y[1:].mul_(2)
        return x.mT, y[:, ::2], (x.exp() * y).sum()

    def inputs() -> list[torch.Tensor]:
        return [torch.randn(4, 4).mT.requires_grad_(), torch.randn(4, 4)]

    assert xla.problems(f, inputs, (2,)) == []


def test_what_differs_is_found_and_the_report_says_how_to_run_it() -> None:
    line = Step("({0} if {0}.device.type == 'xla' else {0} + 1)", (0,))
    program = Program((Input((2, 3)),), (line,), (1,), target="xla")
    found = fusion.problems([program], "xla")[0]
    assert "elements differ" in found[0]
    assert "fuzz.xla.problems(f, inputs, (), 'xla') == []" in fuzzers.finding(program, found)["text"]
