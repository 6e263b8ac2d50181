"""Packages and exported programs: a call gives eager's result, or is refused with a code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor import UsageError
from dynamotor.base.config import config


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with config.patch(cache_dir=str(tmp_path_factory.mktemp("cache"))):
        yield


X, Y = torch.ones(3), torch.full((3,), 5.0)
ROWS, COLUMNS = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).t()
HELD = torch.ones(3)
PART = torch.ones(5)[1:4]


def marked(scale: float) -> torch.Tensor:
    x = torch.ones(3)
    x.scale = scale  # type: ignore[attr-defined]
    return x


# Name: the program, example arguments, arguments of calls.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[tuple[Any, ...]]]] = {
    "strides": (lambda a: a + 1 if a.is_contiguous() else a - 1, (ROWS,), [(COLUMNS,), (ROWS * 2,)]),
    "a stride as a number": (lambda a: a * a.stride(0), (ROWS,), [(COLUMNS,), (ROWS * 2,)]),
    "two objects": (lambda a, b: a * 2 if a is b else a * 3, (X, Y), [(X, X), (Y, X)]),
    "one object": (lambda a, b: a + 10 * b, (X, X), [(X, Y), (Y, Y)]),
    "an object that the code holds": (lambda a: a + 10 * HELD, (HELD,), [(Y,)]),
    "requires_grad": (
        lambda a: a * 2 if a.requires_grad else a * 3,
        (X,),
        [(X.clone().requires_grad_(),), (Y,)],
    ),
    "an attribute": (lambda a: a * a.scale, (marked(2.0),), [(marked(3.0),)]),
    "no attribute": (lambda a: a * getattr(a, "scale", 1.0), (X,), [(marked(3.0),), (Y,)]),
    "a leaf": (lambda a: a * 2 if a.is_leaf else a * 3, (X,), [(Y,)]),
    "an offset": (lambda a: a * a.storage_offset(), (PART,), [(X,), (PART,)]),
    "a class": (
        lambda a: a * 2 if isinstance(a, torch.nn.Parameter) else a * 3,
        (X,),
        [(torch.nn.Parameter(X, False),), (Y,)],
    ),
    "signed zeros": (lambda a, k: a / torch.full((3,), k), (X, -0.0), [(X, 0.0), (X, -0.0)]),
    "the type of a number": (lambda a, k: a * k, (X, 2), [(X, 2.0), (X, 3), (Y, 2)]),
    "None": (lambda a, b: a * 2 if b is None else a + b, (X, None), [(X, Y), (Y, None)]),
    "keys": (
        lambda d: {key: value + 1 for key, value in d.items()},
        ({1: X, "b": Y},),
        [({True: X, "b": Y},), ({"b": Y, 1: X},), ({1: Y, "b": X},)],
    ),
    "a kind of container": (lambda c: c[0] * (2 if type(c) is list else 3), ([X],), [((X,),), ([Y],)]),
    "a length": (lambda c: c[0] * len(c), ([X, Y],), [([X],), ([Y, X],)]),
    "keys of results": (lambda a: {1: a + 1, "1": a + 2, (1, 2): [a * 3], 2.5: a * 5}, (X,), [(Y,)]),
    "strides beside a number": (
        lambda a, n: a * n if a.is_contiguous() else a - n,
        (torch.arange(6.0).view(2, 3), 3),
        [(torch.arange(6.0).view(3, 2).t(), 3)],
    ),
    "a dtype": (lambda a: a * (2 if a.dtype is torch.float32 else 3), (X,), [(X.double(),), (X.long(),)]),
    "a region": (lambda a: _under_no_grad(a), (X,), [(Y,)]),
}


def _under_no_grad(a: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return a * 2


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        keys = [(type(k), k) for k in a] == [(type(k), k) for k in b]
        return type(a) is type(b) and keys and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("way", ["package", "exported_program"])
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_eagers_or_is_refused(name: str, way: str, tmp_path: Path) -> None:
    model, example, calls = CASES[name]
    try:
        program = dynamotor.export(model, example)
        if way == "package":
            program.package(tmp_path / "model.dm")
            run = dynamotor.load(tmp_path / "model.dm")
        else:
            run = program.exported_program().module()
    except UsageError as error:
        assert error.code == "DM114"
        return
    with torch.no_grad():
        assert is_same(run(*example), model(*example))
        for args in calls:
            try:
                found = run(*args)
            except (UsageError, AssertionError, RuntimeError, ValueError) as error:
                if way == "package":
                    assert isinstance(error, UsageError) and error.code == "DM115"
                continue
            if not (
                way == "exported_program" and name == "the type of a number"
            ):  # torch.export compares by ==
                assert is_same(found, model(*args))


@pytest.mark.parametrize("name", ["strides", "one object", "requires_grad", "signed zeros", "keys", "None"])
def test_other_calls_of_a_package_are_refused(name: str, tmp_path: Path) -> None:
    model, example, calls = CASES[name]
    dynamotor.export(model, example).package(tmp_path / "model.dm")
    with pytest.raises(UsageError, match="DM115"):
        dynamotor.load(tmp_path / "model.dm")(*calls[0])


def test_programs_that_change_objects_are_refused(tmp_path: Path) -> None:
    seen: list[int] = []

    def counts(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x * 2

    with pytest.raises(UsageError, match=r"DM114.*changes Python objects"):
        dynamotor.export(counts, (X,)).package(tmp_path / "model.dm")


def test_names_in_another_order(tmp_path: Path) -> None:
    def walks(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: value + 1 for name, value in given.items()}

    dynamotor.export(walks, (), {"b": X, "a": Y}).package(tmp_path / "model.dm")
    run = dynamotor.load(tmp_path / "model.dm")
    assert list(run(b=X, a=Y)) == ["b", "a"]
    with pytest.raises(UsageError, match="DM115"):
        run(a=Y, b=X)


def test_one_tensor_is_one_argument() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert torch.equal(dynamotor.export(model, ROWS).module("eager")(ROWS), ROWS * 2)
    for wrong in ({"x": ROWS}, 3, None):
        with pytest.raises(UsageError, match="DM140"):
            dynamotor.export(model, wrong)  # type: ignore[arg-type]
