"""The loops of `bench --shapes`: right, and two programs each."""

from __future__ import annotations

import pytest
import torch

import dynamotor
from bench.shape_cases import CASES, case_of, names_of
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


def test_names() -> None:
    assert names_of("") == list(CASES) and names_of("packed,function") == ["packed", "function"]
    listed = names_of("models")
    assert len(listed) == 2 * 86 and "model:BertForMaskedLM:train" in listed
