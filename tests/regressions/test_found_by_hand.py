"""Small programs that a person thought of, or a fuzzer, and that were wrong: eager PyTorch is the judge."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor

Program = Callable[[torch.Tensor, torch.Tensor], Any]


def _parts_are_written(x: torch.Tensor, y: torch.Tensor) -> Any:
    whole = x * 2
    first, last = whole.unsafe_chunk(2, 1)
    first.mul_(y[:, :2])
    return whole * 3, last + 1


def _whole_is_written(x: torch.Tensor, y: torch.Tensor) -> Any:
    whole = x * 2
    parts = whole.unsafe_split_with_sizes([1, 3], 1)
    whole.mul_(y)
    return whole, *parts


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("program", [_parts_are_written, _whole_is_written])
def test_unsafe_parts_lie_in_their_source(program: Program, graded: bool) -> None:
    """Autograd knows no views there: each keeps the history that it was given."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    results = []
    for function in (program, dynamotor.compile(program, backend="aot_eager")):
        leaf = x.clone().requires_grad_(graded)
        made = function(leaf, y)
        gradients = [torch.autograd.grad(one.sum(), leaf, retain_graph=True) for one in made if graded]
        results.append((*made, *gradients))
    torch.testing.assert_close(*results)


def test_an_input_of_inference_mode_is_not_saved() -> None:
    """Autograd refuses to save one: eager saves what is made of it, a compiled backward might want it."""
    with torch.inference_mode():
        x = torch.randn(3)
    weight = torch.randn(3, requires_grad=True)

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.clone() * weight

    result = dynamotor.compile(program)(x, weight)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), weight)[0], x.clone())


class Box:
    pass


def _attributes_behind_a_break(x: torch.Tensor) -> Any:
    box: Any = Box()
    box.y = 2
    seen = [vars(box)]
    print(end="")
    box.y = 5
    return seen, vars(box) is seen[0]


def _attributes_that_were_given(x: torch.Tensor) -> Any:
    box, given = Box(), {"y": 1}
    before = box.__dict__
    box.__dict__ = given
    print(end="")
    given["y"] = 3
    return box.y, before, vars(box) is given  # type: ignore[attr-defined]


def _a_warning_that_the_function_records(x: torch.Tensor) -> Any:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        warnings.warn("said", stacklevel=1)
        return len(record), str(record[0].message)


@pytest.mark.parametrize(
    "function",
    [_attributes_behind_a_break, _attributes_that_were_given, _a_warning_that_the_function_records],
)
def test_what_changes_later_is_seen(function: Callable[..., Any]) -> None:
    x = torch.ones(2)
    assert dynamotor.compile(function, backend="eager")(x) == function(x)


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_a_nan_that_the_compiler_knows_becomes_the_whole_number_of_the_processor(isa: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = x.mean(-1, dtype=torch.float64)
        return mean.to(torch.int64), mean.to(torch.int32)

    x = torch.zeros(0, dtype=torch.bool)
    assert dynamotor.compile(fn, options={"isa": isa})(x) == fn(x)


def test_a_convolution_without_output_channels_is_refused() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d(x, w, padding=1) * 2

    for call in (fn, dynamotor.compile(fn)):
        with pytest.raises(RuntimeError, match="at least 1 at dimension 0"):
            call(torch.zeros(1, 0), torch.zeros(0, 1, 0))


@pytest.mark.parametrize("position", [1.5, "a", None, True, -1])
def test_positions_and_counts_of_lists_are_whole_numbers(position: Any) -> None:
    def fn(x: torch.Tensor) -> Any:
        items, queue, errors = [1, 2, 3], deque([1, 2, 3]), []
        for change in (queue.rotate, items.pop, lambda at: items.insert(at, 7)):
            try:
                change(position)
            except TypeError as error:
                errors.append(str(error))
        return x + len(errors), items, [*queue], errors

    x = torch.zeros(2)
    found, wanted = dynamotor.compile(fn, backend="eager")(x), fn(x)
    assert found[1:] == wanted[1:] and torch.equal(found[0], wanted[0])


def _cubes(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum()


def _inside(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.func.grad(_cubes)(x)


TRANSFORMED: list[Callable[[torch.Tensor], Any]] = [
    torch.func.grad(_cubes),
    torch.func.jacrev(_cubes),
    torch.func.jacfwd(_cubes),
    torch.func.hessian(_cubes),
    lambda x: torch.func.grad_and_value(_cubes)(x),
    lambda x: torch.func.vjp(torch.sin, x)[1](x),
    lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    lambda x: torch.vmap(lambda row: row * 2)(x),
    _inside,
]


@pytest.mark.parametrize("region", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_what_transforms_give_under_inference_mode(region: Any) -> None:
    """They were inference tensors, which no backward may save; eager's are not."""
    for function in TRANSFORMED:
        said = []
        for run in (function, dynamotor.compile(function, backend="aot_eager")):
            with region():
                found: Any = run(torch.ones(3))
            parts = found if isinstance(found, tuple) else (found,)
            said.append([(part.is_inference(), part.tolist()) for part in parts])
        assert said[1] == said[0]


class Registry:
    table: dict[str, int] = {}

    def __class_getitem__(cls, name: str) -> int:
        cls.table["asked"] += 1
        return cls.table[name]


class Table(type):
    table: dict[str, int] = {}

    def __getitem__(cls, name: str) -> int:
        cls.table["asked"] += 1
        return cls.table[name]

    def __or__(cls, other: Any) -> Any:
        return cls.table["a"]

    def __int__(cls) -> int:
        return cls.table["a"]

    def __repr__(cls) -> str:
        return str(cls.table["a"])


class OfTable(metaclass=Table):
    pass


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x * Registry["a"],
        lambda x: x * OfTable["a"],
        lambda x: x * (OfTable | 3),
        lambda x: x * int(OfTable),  # type: ignore[call-overload]
        lambda x: x * len(repr(OfTable)) + int(f"{OfTable}"),
    ],
    ids=["class_getitem", "getitem_of_the_metaclass", "or", "int", "repr"],
)
def test_operators_on_classes_that_a_program_wrote_run_at_each_call(
    program: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """They were run once, while compiling, and their result was a constant."""
    results = []
    for function in (program, dynamotor.compile(program, backend="eager")):
        Registry.table = Table.table = {"a": 2, "asked": 0}
        found = [function(torch.ones(2)), function(torch.ones(2))]
        Registry.table["a"] = 7
        results.append(([*found, function(torch.ones(2))], Registry.table["asked"]))
    torch.testing.assert_close(*results)
