"""The loops of `bench --shapes`: right, and two programs each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import dynamotor
from bench import shapes
from bench.shape_cases import CASES, Case, case_of, names_of
from dynamotor.base.events import counters


@pytest.mark.parametrize("name", ["packed", "calls-few"])
def test_a_loop_is_right_and_compiles_twice(name: str) -> None:
    dynamotor.reset()
    torch.manual_seed(0)
    before, case = counters["frames"]["captured"], case_of(name)
    compiled = dynamotor.compile(case.model)
    for want, got in zip(list(case.steps(case.model)), case.steps(compiled), strict=True):
        torch.testing.assert_close(got, want)
    assert counters["frames"]["captured"] - before == 2


def test_a_row_counts_breaks_and_the_parts_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return torch.special.zeta(x + 2, x + 1)

    def steps(call: Callable[..., torch.Tensor]) -> Iterator[torch.Tensor]:
        yield from (call(torch.ones(n)) for n in (2, 3))

    monkeypatch.setattr(shapes, "case_of", lambda name: Case(broken, steps, count=2))
    dynamotor.reset()
    row = shapes.measured("broken", "ours", 0.0, "cpu")
    assert row["breaks"] >= 1 and not row["left_to_eager"]
    assert row["aten_calls"].keys() == {"aten.special_zeta.default"}


def test_names() -> None:
    assert names_of("") == list(CASES) and names_of("packed,function") == ["packed", "function"]
    listed = names_of("models")
    assert len(listed) == 2 * 86 and "model:BertForMaskedLM:train" in listed
