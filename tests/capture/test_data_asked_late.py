"""Tests of data that are handed on, or that only warn, are computed in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor
from bench import models, share


def holds(x: torch.Tensor) -> Any:
    return x * 2, 3 in x, 2.5 not in x, x[0] in x, True in x


def refuses(x: torch.Tensor) -> torch.Tensor:
    if 7 in x:
        raise ValueError("7 is not allowed")
    return x + 1


def asks_a_text(x: torch.Tensor) -> Any:
    try:
        return "a" in x
    except RuntimeError as error:
        return type(error)


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("values", [[1.0, 3.0], [2.5, 4.0], [float("nan"), 1.0]])
def test_in_is_computed_in_the_graph(values: list[float], backend: str) -> None:
    x, before = torch.tensor(values), dynamotor.counters["breaks"].total()
    got, want = dynamotor.compile(holds, backend=backend)(x), holds(x)
    torch.testing.assert_close(got[0], want[0], equal_nan=True)
    assert got[1:] == want[1:] and list(map(type, got[1:])) == [bool] * 4
    assert dynamotor.counters["breaks"].total() == before


def test_in_before_a_raise_is_put_off() -> None:
    compiled = dynamotor.compile(refuses, fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(ValueError, match="7 is not allowed"):
        compiled(torch.tensor([1.0, 7.0, 2.0]))


def test_in_with_another_operand_breaks_as_before() -> None:
    assert dynamotor.compile(asks_a_text)(torch.ones(2)) == asks_a_text(torch.ones(2))


def padded_and_not(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], list[Any], list[str]]:
    """A small GPT-2, ids without and with padding at an end, and the warnings that it has given."""
    case = models.load("GPT2LMHeadModel", small=True, dropout=False)
    import transformers.modeling_utils

    texts: list[str] = []
    monkeypatch.setattr(
        transformers.modeling_utils.logger, "warning_once", lambda text, *more: texts.append(text)
    )
    ids = case.make_inputs()[1]["input_ids"].clamp(min=1)
    padded = ids.clone()
    padded[0, -1] = case.model.config.pad_token_id
    return case.model.eval(), [ids, padded], texts


@pytest.mark.slow
def test_a_warning_about_padding_is_given_where_eager_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, padded), texts = padded_and_not(monkeypatch)
    compiled, before = dynamotor.compile(model, backend="eager"), dynamotor.counters["breaks"].total()
    for given in (ids, padded, ids, padded):
        with torch.no_grad():
            want, expected = model(given).logits, texts.copy()
            texts.clear()
            got = compiled(given).logits
        torch.testing.assert_close(got, want)
        assert texts == expected and any("attention_mask" in text for text in texts) is (given is padded)
        texts.clear()
    assert dynamotor.counters["breaks"].total() == before


@pytest.mark.slow
def test_nothing_of_that_check_runs_outside_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, _), _ = padded_and_not(monkeypatch)

    def program(compile_: Any) -> None:
        compiled = compile_(model)
        with torch.no_grad():
            compiled(ids)
            compiled(ids)

    calls = share.measured(program, "dynamotor")
    assert calls.share == 1.0, calls.eager
