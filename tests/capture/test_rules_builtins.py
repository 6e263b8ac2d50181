"""`locals()` and its dicts."""

from __future__ import annotations

import locale
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters


def f_locals(x: torch.Tensor) -> Any:
    exec("z = 3")
    return x + locals().get("z", 0), sorted(locals())


def f_held_locals(x: torch.Tensor) -> Any:
    held = locals()
    held["q"] = 5
    y = x + 1
    print(end="")
    return y, locals().get("q")


def f_inlined(x: torch.Tensor) -> Any:
    return f_held_locals(x * 2), f_locals(x - 1)


@pytest.mark.regression
@pytest.mark.parametrize("function", [f_locals, f_held_locals, f_inlined])
def test_dicts_of_locals(function: Callable[..., Any]) -> None:
    compiled = dynamotor.compile(function, backend="eager")
    for _ in range(2):
        assert str(compiled(torch.ones(2))) == str(function(torch.ones(2)))


@pytest.mark.regression
@pytest.mark.parametrize("method", [torch.Tensor.__len__, torch.Tensor.__iter__])
@pytest.mark.parametrize("value", [[], {1, 2}, "ab", 5])
def test_methods_of_tensors_refuse_other_objects(method: Callable[..., Any], value: Any) -> None:
    def fn(x: torch.Tensor, value: Any) -> Any:
        try:
            return method(value)
        except AttributeError as error:
            return str(error)

    x = torch.zeros(1)
    assert dynamotor.compile(fn, backend="eager")(x, value) == fn(x, value)


@pytest.mark.regression
@pytest.mark.parametrize(
    "fn",
    [lambda x, n: (x + 1, f"{n:n}"), lambda x, n: (x + 1, "{:>9n}".format(n))],  # noqa: UP032
)
def test_a_number_written_as_in_a_locale_is_written_again_in_another(
    fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = dynamotor.compile(fn, backend="eager")
    before = counters["frames"]["captured"]
    for separator in ("", "", "."):
        monkeypatch.setattr(locale, "_override_localeconv", {"thousands_sep": separator})
        assert compiled(torch.zeros(1), 1234567)[1] == fn(torch.zeros(1), 1234567)[1]
    assert counters["frames"]["captured"] - before == 2
